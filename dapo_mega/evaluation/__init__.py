"""How good a model is: held-out evaluation, statistics over problems, and comparisons of saved evaluations"""
