"""Carries out a plan's messages between ranks, and says who failed to send.

`groups.py` makes the process groups, `comm.py` sends what a plan lists, `agreement.py` compares the
calls of the ranks, `watchdog.py` names what does not get through on NCCL and `failure.py` says
which rank was first; `lock.py` keeps a second job out of a directory, `pinned.py` and `host.py` are
for copies between host and GPU. A new way to move bytes goes here; what is moved is decided in
`plans`.
"""
