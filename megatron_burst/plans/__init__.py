"""Who sends what to whom, and who computes which tile when.

Everything here is a pure function or a value: no process, no device, no message. A new schedule is
a `Schedule` in schedules/ beside `Ring` and `Mesh`, for `choice.planning.choose`; a new mask is
described in visibility/mask.py, cut into tiles in schedules/tiles.py. The tests' simulator judges
every plan.
"""
