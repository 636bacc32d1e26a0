"""Who sends what to whom, and who computes which tile when.

Everything here is a pure function or a value: no process, no device, no message. A new schedule is
a `schedule.Schedule` beside `rings.Ring` and `mesh.Mesh`, for `planning.choose`; a new mask is
described in `mask.py` and cut into tiles in `tiles.py`. The tests' simulator judges every plan.
"""
