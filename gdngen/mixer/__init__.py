"""What stands around the recurrence in a token mixer: short convolution and row-wise norms, from the same compiler."""
