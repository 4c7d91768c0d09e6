"""`h3dist doctor`: what a run would stumble over on this machine, each finding with its remedy.

Whatever can hang or crash (the driver, a dead file system, a copy between GPUs) is asked in a child process under a
time limit. The parent stays small, imports no torch, and only puts the answers together: `examine.py`.
"""
