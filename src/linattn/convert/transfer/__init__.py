"""Stage 1: each converted layer learns the output of the softmax attention it replaces."""

from linattn.convert.transfer.options import LayerCurve, TransferOptions
from linattn.convert.transfer.round import transfer_errors
from linattn.convert.transfer.stage import transfer

__all__ = ["LayerCurve", "TransferOptions", "transfer", "transfer_errors"]
