# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From proof to code
#
# > Two helpers tie every derivation to the function that implements it: `prove` and `assert_same`.

# %%
#| default_exp symbolic

# %% [markdown]
# **So far** we have a pair to compute with. **Now** we need a way to trust the formulas that will transform it.
# **Why**: a derivation on the page and a function in the library drift apart unless a machine holds them together. Here SymPy proves the formula, and the formula itself,
# turned into a torch function, is compared with the library in value and in first derivative.

# %%
#| exports
from collections.abc import Callable, Sequence
from typing import Any

import sympy as sp
import torch
from torch import Tensor

# %% [markdown]
# ## Prove
#
# A proof cell ends on the simplified difference of two sides. Zero is the proof.


# %%
#| exports
def prove(
    difference: sp.Expr,  # left side minus right side
) -> sp.Expr:  # zero
    "Simplify a difference to zero, or raise `AssertionError` with what is left."
    rest = sp.simplify(sp.expand(difference)) if difference != 0 else sp.Integer(0)
    if rest != 0:
        rest = sp.simplify(sp.factor(sp.together(difference)))
    if rest != 0:
        raise AssertionError(f"not proved, what is left: {rest}")
    return rest


# %%
a, b = sp.symbols("a b", positive=True)
prove(1 / (1 / a + 1 / b) - a * b / (a + b))

# %% [markdown]
# A wrong claim is refused, and the message shows by how much it is wrong:

# %%
from fastcore.test import test_fail

# %%
test_fail(lambda: prove(1 / (1 / a + 1 / b) - (a + b)), contains="not proved")

# %% [markdown]
# ## Run the formula
#
# `sympy.lambdify` turns an expression into a differentiable torch function.


# %%
#| exports
def torch_fn(
    args: Sequence[sp.Symbol],  # positional arguments of the function, in order
    expr: sp.Expr,  # the derived formula
) -> Callable[..., Tensor]:  # acts elementwise on tensors, differentiable
    "A SymPy formula as a torch function."
    return sp.lambdify(list(args), expr, modules="torch")


# %%
harmonic = torch_fn((a, b), a * b / (a + b))
harmonic(torch.tensor(3.0), torch.tensor(6.0))

# %% [markdown]
# ## Hold code and formula together


# %%
#| exports
def random_points(
    n_args: int,  # how many tensors
    n: int = 256,  # points
    lo: float = 0.1,  # smallest value drawn
    hi: float = 5.0,  # largest value drawn
    seed: int = 0,
) -> list[Tensor]:  # float64 leaves that require gradients
    "Where a formula and a function are compared."
    gen = torch.Generator().manual_seed(seed)
    return [(lo + (hi - lo) * torch.rand(n, generator=gen, dtype=torch.float64)).requires_grad_() for _ in range(n_args)]


# %%
#| exports
def assert_same(
    expr: sp.Expr,  # the derived formula
    args: Sequence[sp.Symbol],  # its symbols, in the order of `fn`
    fn: Callable[..., Tensor],  # the library's implementation
    **draw: Any,  # `n`, `lo`, `hi`, `seed` of `random_points`
) -> float:  # largest absolute difference of the values
    "Raise `AssertionError` unless `fn` and `expr` agree, with their first derivatives, at random positive points."
    xs = random_points(len(args), **draw)
    # adding zero times each argument makes a constant formula a tensor that depends, trivially, on all of them
    want = torch_fn(args, expr)(*xs) + sum(0 * x for x in xs)
    got = fn(*xs) + sum(0 * x for x in xs)
    torch.testing.assert_close(got, want)
    for grad_got, grad_want in zip(torch.autograd.grad(got.sum(), xs), torch.autograd.grad(want.sum(), xs), strict=True):
        torch.testing.assert_close(grad_got, grad_want)
    return float((got - want).abs().max().detach())


# %%
assert_same(a * b / (a + b), (a, b), lambda x, y: 1 / (1 / x + 1 / y))

# %% [markdown]
# It fails on a wrong value, and also on a right value with a wrong derivative (here the gradient of the second argument is cut):

# %%
test_fail(lambda: assert_same(a + b, (a, b), torch.mul))
test_fail(lambda: assert_same(a + b, (a, b), lambda x, y: x + y.detach()))

# %% [markdown]
# ## Assumptions, and where they break
#
# The points are random and positive; a formula that is wrong only on a set of measure zero, or only for negative arguments, passes. Limits and edge cases therefore get tests of their own in each chapter.
#
# ## Summary
#
# - `prove` accepts a claim only when SymPy reduces the difference to zero.
# - `torch_fn` runs the proved formula.
# - `assert_same` compares it with the library in value and gradient, so derivation and code cannot drift.
#
# ## Exercises
#
# **1.** Prove that the product of two Gaussian densities in $x$ has precision $a + b$.
#
# <details><summary>Answer</summary>

# %%
x, m = sp.symbols("x m", real=True)
log_density = -a * x**2 / 2 - b * (x - m) ** 2 / 2
prove(-sp.diff(log_density, x, 2) - (a + b))

# %% [markdown]
# </details>
