"""Functions of tensors: advantages, losses, off-policy corrections, log-probabilities.

Dimensions: P groups in a batch, G episodes in a group, N trained tokens (flattened), D hidden size, V vocabulary.
"""
