"""Places inside a prefill chunk whose state is kept."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Boundaries:
    """States that a step leaves behind besides its rows' last ones, as int32 tensors on the device.

    Row r's are the entries `row_start[r] .. row_start[r + 1]`. tokens[i]: of that row's tokens in this step,
    the number after which the state is taken, rising within a row, 1 to the row's length. rows[i]: the block
    that it goes to. row_start: [R + 1]; tokens, rows: [B].
    """

    row_start: Tensor
    tokens: Tensor
    rows: Tensor
