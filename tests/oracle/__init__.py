"""What every part should compute, in float64 NumPy, written to be read: forward, and backward derived by hand.

`f(inputs) -> output` comes with `f_vjp(d_output, inputs) -> d_inputs`, the vector-Jacobian product: given the gradient
of some scalar loss with respect to the output, it returns that with respect to each input. Nothing is cached between
the two, nothing is fast. tests/unit/test_oracle*.py hold every vjp to central differences.
"""
