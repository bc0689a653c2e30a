"""How good a model is: benchmarks, held-out evaluation, statistics over problems, comparisons of saved evaluations"""
