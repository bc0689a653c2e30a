"""How good a model is: benchmarks, held-out evaluation, statistics over problems, and comparisons of saved evaluations"""
