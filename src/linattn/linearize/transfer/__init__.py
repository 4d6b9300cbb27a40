"""Stage 1: each converted layer learns the output of the softmax attention it replaces."""

from linattn.linearize.transfer.options import LayerCurve, TransferOptions
from linattn.linearize.transfer.round import transfer_errors
from linattn.linearize.transfer.stage import transfer

__all__ = ["LayerCurve", "TransferOptions", "transfer", "transfer_errors"]
