"""The numbers of the rules in ``rules.py``; apart from it, because naming a rule should not load Numba."""

SGD, MOMENTUM, ADAGRAD, ROW_WISE, ADAM, AMSGRAD, RMSPROP, ADAMAX, FTRL = range(9)
