"""What ``naranhi.World`` is made of: lifelines, the rank's own side, launching, and failures.

``world.py`` is the notebook's side. ``process.py`` is what runs inside each rank. The rest is
between them.
"""
