"""Predicts memory, bytes, exposed communication and time of a step, and ranks the algorithms."""
