"""The paper's Table 1 again, and all methods against one another: many runs that differ in known keys.

`arms.py` says which runs there are, `plan.py` resolves them, `tasks.py` makes what they start from, `runner.py` carries
them out, `results.py` and the files around it say what came out.
"""
