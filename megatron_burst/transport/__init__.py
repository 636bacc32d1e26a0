"""Carries out a plan's messages between ranks, and says who failed to send.

`groups.py` makes the process groups, `comm.py` sends what a plan lists, `watchdog.py` ends a rank
that waits too long and `failure.py` says which rank was first. A new way to move bytes goes here;
what is moved is decided in `plans`.
"""
