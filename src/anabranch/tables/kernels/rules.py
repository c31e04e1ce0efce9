"""The optimizers' rules, a row at a time: a number each.

``w`` holds the weights of a row from ``a`` on and ``x`` its states from ``s`` on, ``wide`` numbers each (row-wise
Adagrad's is one number); ``g`` holds the gradient from ``b`` on, in the type of the weights. ``c`` are the constants of
a step, as ``RowOptimizer.constants`` lists them. The arithmetic is that of torch's fused optimizers, bit for bit: where
their compiled form multiplies and adds in one rounding, ``fma`` is used, otherwise a plain expression. RMSprop, Adamax
and FTRL, which torch has no fused form of, agree with its plain form within rounding: its square root is not exact. So
does SGD in bfloat16, where torch's fused form moves nothing: numbers are rounded after each of the plain form's
operations, as is what it multiplies by while it adds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anabranch.tables.kernels.numbers import U, coarse, fma, inline, kernel, load, number, rounded

SGD, MOMENTUM, ADAGRAD, ROW_WISE, ADAM, AMSGRAD, RMSPROP, ADAMAX, FTRL = range(9)


_QUIET = 8  # steps in a row that leave the weights as they are
_LOOK_EVERY = 64  # missed steps between two checks for rows that no longer change


@inline
def _gradient(w: Any, a: Any, g: Any, b: Any, decay: Any, sign: Any) -> Any:
    # Plus zero, as a sum of gradients that begins with it: torch's dense gradients hold no -0.0.
    return fma(load(w, a), decay, (load(g, b) + number(w, 0.0)) * sign)


@inline
def sgd(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    lr, decay, sign = coarse(w, -c[0]), coarse(w, c[4]), number(w, c[5])
    for j in range(wide):
        w[a + j] = rounded(w, fma(lr, coarse(w, _gradient(w, a + j, g, b + j, decay, sign)), load(w, a + j)))


@inline
def momentum(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    lr, momentum, fresh = coarse(w, -c[0]), number(w, c[1]), coarse(w, c[2])
    decay, sign, ahead = coarse(w, c[4]), number(w, c[5]), coarse(w, c[1])
    nesterov, first = c[3] != 0, c[6] != 0
    for j in range(wide):
        grad = coarse(w, _gradient(w, a + j, g, b + j, decay, sign))
        mean = load(x, s + j)
        mean = grad if first else coarse(w, fma(grad, fresh, coarse(w, mean * momentum)))
        x[s + j] = rounded(x, mean)
        w[a + j] = rounded(w, fma(lr, coarse(w, fma(mean, ahead, grad)) if nesterov else mean, load(w, a + j)))


@inline
def adagrad(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    lr = coarse(w, c[0])  # torch rounds Adagrad's rate, and no other's, to bfloat16
    eps, decay, sign = number(w, c[1]), number(w, c[4]), number(w, c[5])
    for j in range(wide):
        grad = _gradient(w, a + j, g, b + j, decay, sign)
        squares = fma(grad, grad, load(x, s + j))
        x[s + j] = rounded(x, squares)
        w[a + j] = rounded(w, load(w, a + j) - lr * grad / (np.sqrt(squares) + eps))


@inline
def row_wise(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    decay, sign, squares = number(w, c[4]), number(w, c[5]), 0.0
    for j in range(wide):
        grad = (load(g, b + j) + number(w, 0.0)) * sign + load(w, a + j) * decay
        squares += np.float64(grad) * np.float64(grad)
    total = number(w, load(x, s) + number(w, squares / wide))
    x[s] = rounded(x, total)
    scale = number(w, c[0] / (np.sqrt(np.float64(total)) + c[1]))
    for j in range(wide):
        value = load(w, a + j)
        w[a + j] = rounded(w, value - ((load(g, b + j) + number(w, 0.0)) * sign + value * decay) * scale)


@inline
def _adam(w: Any, a: Any, x: Any, s: Any, wide: Any, largest: bool, g: Any, b: Any, c: Any) -> None:
    step, root, share, beta2 = number(w, c[0]), number(w, c[1]), number(w, c[2]), number(w, c[3])
    decay, sign, eps, keep = number(w, c[4]), number(w, c[5]), number(w, c[6]), number(w, c[7])
    share2, rest = number(w, c[8]), number(w, 1.0) - share
    near = share < number(w, 0.5)  # torch's lerp counts from the nearer end
    for j in range(wide):
        grad = _gradient(w, a + j, g, b + j, decay, sign)
        mean, squares = load(x, s + j), load(x, s + wide + j)
        mean = fma(share, grad - mean, mean) if near else fma(mean - grad, rest, grad)
        squares = fma(share2 * grad, grad, squares * beta2)
        x[s + j], x[s + wide + j] = rounded(x, mean), rounded(x, squares)
        if largest:
            squares = max(squares, load(x, s + wide + wide + j))
            x[s + wide + wide + j] = rounded(x, squares)
        w[a + j] = rounded(w, load(w, a + j) * keep + step * mean / (np.sqrt(squares) / root + eps))


@inline
def adam(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    _adam(w, a, x, s, wide, False, g, b, c)


@inline
def amsgrad(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    _adam(w, a, x, s, wide, True, g, b, c)


@inline
def rmsprop(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    lr, momentum, alpha, eps = number(w, -c[0]), number(w, c[1]), number(w, c[2]), number(w, c[6])
    decay, sign, rest = number(w, c[4]), number(w, c[5]), number(w, 1 - c[2])
    buffered, centered, last = c[1] > 0, c[3] != 0, s + (wide + wide if c[1] > 0 else wide)
    for j in range(wide):
        grad = _gradient(w, a + j, g, b + j, decay, sign)
        squares = fma(rest * grad, grad, load(x, s + j) * alpha)
        x[s + j] = rounded(x, squares)
        if centered:
            mean = load(x, last + j)
            mean = fma(rest, grad - mean, mean)
            x[last + j] = rounded(x, mean)
            squares = max(fma(-mean, mean, squares), number(w, 0.0))
        root = np.sqrt(squares) + eps
        if buffered:
            step = load(x, s + wide + j) * momentum + grad / root
            x[s + wide + j] = rounded(x, step)
            w[a + j] = rounded(w, fma(lr, step, load(w, a + j)))
        else:
            w[a + j] = rounded(w, load(w, a + j) + lr * grad / root)


@inline
def adamax(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    lr, share, beta2, eps = number(w, -c[0]), number(w, 1 - c[2]), number(w, c[3]), number(w, c[6])
    decay, sign, near = number(w, c[4]), number(w, c[5]), 1 - c[2] < 0.5
    rest = number(w, 1.0) - share
    for j in range(wide):
        grad = _gradient(w, a + j, g, b + j, decay, sign)
        mean = load(x, s + j)
        mean = fma(share, grad - mean, mean) if near else fma(mean - grad, rest, grad)
        most = max(load(x, s + wide + j) * beta2, abs(grad) + eps)
        x[s + j], x[s + wide + j] = rounded(x, mean), rounded(x, most)
        w[a + j] = rounded(w, load(w, a + j) + lr * mean / most)


@inline
def ftrl(w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    # ``FTRL._move`` in ``gradient_optimizers.py`` has the reasons.
    lr, beta, l1, l2, sign = number(w, c[0]), number(w, c[2]), number(w, c[3]), number(w, c[6]), number(w, c[5])
    zero = number(w, 0.0)
    if lr == zero:
        return
    for j in range(wide):
        grad, value, led = load(g, b + j) * sign, load(w, a + j), load(x, s + j)
        squares = load(x, s + wide + j) + grad * grad
        scale = (np.sqrt(squares) + beta) / lr + l2
        led = -(value * scale + (l1 if value > zero else -l1)) if value != zero else min(max(led, -l1), l1)
        led += grad
        if grad != zero:
            moved = ((l1 if led > zero else -l1) - led) / scale if abs(led) > l1 else zero
            w[a + j], x[s + j] = rounded(w, moved), rounded(x, led)
        x[s + wide + j] = rounded(x, squares)


@kernel
def move_row(rule: int, w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any) -> None:
    """One step of one row."""
    if rule == SGD:
        sgd(w, a, x, s, wide, g, b, c)
    elif rule == MOMENTUM:
        momentum(w, a, x, s, wide, g, b, c)
    elif rule == ADAGRAD:
        adagrad(w, a, x, s, wide, g, b, c)
    elif rule == ROW_WISE:
        row_wise(w, a, x, s, wide, g, b, c)
    elif rule == ADAM:
        adam(w, a, x, s, wide, g, b, c)
    elif rule == AMSGRAD:
        amsgrad(w, a, x, s, wide, g, b, c)
    elif rule == RMSPROP:
        rmsprop(w, a, x, s, wide, g, b, c)
    elif rule == ADAMAX:
        adamax(w, a, x, s, wide, g, b, c)
    else:
        ftrl(w, a, x, s, wide, g, b, c)


# --- gradients that are sums over several steps -----------------------------------------------------------------------


@inline
def correct(
    rule: int, w: Any, a: Any, x: Any, s: Any, wide: Any, g: Any, b: Any, c: Any, squares: float, floor: float
) -> None:
    """Make second moments such that the step with this gradient adds ``squares`` times its square.

    Adagrad and Adam scale a step by the squares of the gradients so far. Fifty equal gradients, added up, have 2,500
    times the square of one, not 50 times: as one gradient they would slow a row down for good, most of all the most
    used rows. So a sum is sent with its *squares*, the sum of its gradients' squares divided by the square of their
    sum: 1 for a gradient of one step, 1/50 for 50 equal ones, 1 again for 50 in random directions. Adamax, FTRL and
    centered RMSprop, whose state cannot be corrected this way, treat a sum as one gradient.

    ``floor`` is the least that ``squares`` counts as: less would be lost in the rounding of the subtraction.
    """
    decay, sign, row_wise = number(w, c[4]), number(w, c[5]), rule == ROW_WISE
    share = 1.0
    if rule in (ADAM, AMSGRAD):
        share = c[8] / c[3] if c[3] != 0 else 0.0
        s = s + wide
    elif rule == RMSPROP:
        share = (1 - c[2]) / c[2] if c[2] != 0 and c[3] == 0 else 0.0
    elif rule != ADAGRAD and not row_wise:
        share = 0.0
    if share == 0.0:
        return
    factor, excess, total = number(w, share), number(w, max(number(w, squares), number(w, floor))) - number(w, 1.0), 0.0
    for j in range(wide):
        grad = (load(g, b + j) + number(w, 0.0)) * sign
        grad += decay * load(w, a + j)
        more = grad * grad * excess
        if row_wise:
            total += np.float64(more)
        else:
            x[s + j] = rounded(x, load(x, s + j) + coarse(x, more * factor))
    if row_wise:
        x[s] = rounded(x, load(x, s) + number(w, total / wide))


# --- steps that a row missed ------------------------------------------------------------------------------------------


@inline
def _stays_quiet(adam: bool, history: Any, quiet_since: int, now: int, until: int) -> bool:
    """Return true if no move after step ``now`` can change a weight, given that none since ``quiet_since`` has.

    A move at ``quiet_since`` was at most half a unit in the last place of its weight. Without a gradient a move shrinks
    by momentum (Adam: by beta1 / sqrt(beta2), under amsgrad faster) a step, times what the schedule does; decoupled
    decay shrinks the weight meanwhile, and the unit with it, in powers of two.
    """
    reach = abs(history[quiet_since, 0]) * (history[quiet_since, 1] if adam else 1.0)
    shrunk = 1.0
    for k in range(quiet_since + 1, until):
        size = abs(history[k, 0])
        if adam:
            keep = history[k, 7]
            if keep == 0.0:
                return False
            shrunk *= (1.0 - history[k, 2]) / (math.sqrt(history[k, 3]) * abs(keep))
            size *= history[k, 1] * (1.0 if keep == 1.0 else 2.0)
        else:
            shrunk *= history[k, 1]
        if k > now and size * shrunk > reach:
            return False
        if shrunk < 1e-200:
            return True
    return True


@inline
def _decay_moments(adam: bool, w: Any, a: Any, x: Any, s: Any, wide: Any, c: Any) -> bool:
    """Take a step whose move is too small to change a weight: decoupled decay, and moments. True if one changed."""
    moved = False
    if adam:
        share, beta2, keep = number(w, c[2]), number(w, c[3]), number(w, c[7])
        rest, near = number(w, 1.0) - share, share < number(w, 0.5)
        for j in range(wide):
            mean, squares = load(x, s + j), load(x, s + wide + j)
            w[a + j] = rounded(w, load(w, a + j) * keep)
            x[s + j] = rounded(x, fma(share, -mean, mean) if near else mean * rest)
            x[s + wide + j] = rounded(x, squares * beta2)
            moved |= load(x, s + j) != mean
            moved |= load(x, s + wide + j) != squares
    else:
        momentum = number(w, c[1])
        for j in range(wide):
            mean = load(x, s + j)
            x[s + j] = rounded(x, mean * momentum)
            moved |= load(x, s + j) != mean
    return moved


@inline
def _pushes_on(rule: int, x: Any, s: Any, wide: Any, c: Any) -> bool:
    """Return true if a state moves weights without a gradient: a later, larger rate could change them."""
    first = s if rule == ADAMAX else s + wide
    moving = False
    if rule == ADAMAX or (rule == RMSPROP and c[1] > 0):
        for j in range(wide):
            moving |= load(x, first + j) != number(x, 0.0)
    return moving


@inline
def replay(
    rule: int, words: Any, base: Any, pitch: Any, w: Any, a: Any, x: Any, s: Any, wide: Any, history: Any, since: int,
    may_rest: bool, steady: bool, zeros: Any, before: Any, row: Any,
) -> None:  # fmt: skip
    """Move a row through the steps ``history[since:]``, in none of which it had a gradient, each with its constants.

    Momentum and the Adams: once ``_QUIET`` steps in a row have left the weights unchanged, and no later one can move
    them either, only moments and decoupled decay continue, until they change nothing. Other rules: until a step changes
    no bit. ``may_rest``: no step decays weights into gradients, or has nothing beside a root; ``steady``: the moments'
    constants never change, nor do weights decay. ``before`` and ``row`` are scratch.
    """
    adam, until = rule in (ADAM, AMSGRAD), len(history)
    quick, quiet, resting = adam or rule == MOMENTUM, 0, False
    for k in range(since, until):
        c = history[k]
        if resting:
            if not _decay_moments(adam, w, a, x, s, wide, c) and steady:
                return
            continue
        looks = not quick and may_rest and steady and (k - since) % _LOOK_EVERY == 0
        if looks:
            for j in range(pitch):
                row[j] = words[base + j]
        keep = number(w, c[7] if adam else 1.0)
        for j in range(wide):
            before[j] = load(w, a + j) * keep
        move_row(rule, w, a, x, s, wide, zeros, U(0), c)
        if looks:
            moved = _pushes_on(rule, x, s, wide, c)
            for j in range(pitch):
                moved |= row[j] != words[base + j]
            if not moved:
                return
        elif quick and may_rest:
            moved = False
            for j in range(wide):
                moved |= load(w, a + j) != before[j]
            quiet = 0 if moved else quiet + 1
            if quiet and quiet % _QUIET == 0:
                resting = _stays_quiet(adam, history, k - _QUIET + 1, k, until) or _stays_quiet(
                    adam, history, k - quiet + 1, k, until
                )
