"""Softmaxes of products of two tables, where the matrix of logits is too large to keep.

log_normalizers       [P] of states over words: P x V logits block by block; for the backward either these again, or
                      probabilities that were kept, in the type of the products
child_probabilities   [N, N+P] twice (or of each sentence): logits block by block, probabilities once in the rules' type
"""

from flash_inside.precision import product_precision
from flash_inside.softmax.children import child_probabilities
from flash_inside.softmax.normalizers import log_normalizers
from flash_inside.softmax.products import operand, rounded_factors

__all__ = ["child_probabilities", "log_normalizers", "operand", "product_precision", "rounded_factors"]
