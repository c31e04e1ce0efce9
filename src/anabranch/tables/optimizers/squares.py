"""Gradients of several steps sent as one sum: their effect on an optimizer's second moments.

Adagrad and Adam scale a step by the squares of the gradients so far. Fifty equal gradients, added up, have 2,500 times
the square of one, not 50 times: as one gradient they would slow a row down for good, most of all the most used rows. So
a sum is sent with its *squares*, the sum of its gradients' squares divided by the square of their sum: 1 for a gradient
of one step, 1/50 for 50 equal ones, 1 again for 50 in random directions. The rules do not handle it: they add the
square of the sum, and ``correct`` of ``kernels/rules.py`` subtracts the excess beforehand. Adamax, FTRL and centered RMSprop, whose state cannot be
corrected this way, treat a sum as one gradient.
"""
