"""What a configuration says of sparse branches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...layers.configuration import ModelFields


@dataclass(kw_only=True, repr=False)
class SparseFields(ModelFields):
    """Fields of the sparse branches beside recurrent layers.

    Args:
        sparse_attention: what every recurrent layer has beside it, a softmax attention to a few keys (HAX): "lsh" (the
            latest keys of the query's hash bin), "key_selection" (the best keys by a learned score), "sliding_window"
            (the latest), "sink" (the first), "dilated" (the latest of every m-th, m = `max_position_embeddings` /
            keys), "full" (the last `max_position_embeddings`), some of them joined by "+", or "hax" for
            "lsh+key_selection"; or a list with one a layer, None for none. Default: None, no layer has any.
        sparse_keys: keys that a query sees, split evenly among the parts. Default: 64.
        sparse_num_heads: heads of the branch, a divisor of the groups of values. Default: None, as many as these.
        sparse_key_dim: width of its queries and keys. Default: 16.
        sparse_hash: "argmax" of random projections, or "sign", the bits that say which of them are positive.
            Default: "argmax".
        sparse_hash_size: projections: bins of "argmax", bits of "sign". Default: 64.
        sparse_hash_center: hash what is left of queries and keys without the mean of all so far ("prefix"), or None.
            Default: "prefix".
        sparse_gate_init: start of the factor, one a channel, of what the branch adds. Default: None, as loud as the
            recurrence: `output_init_rms`, or 1 where that is not set.
        sparse_query_init: as `query_init`, of the branch, in layers whose recurrence does not start with "induction"
            itself. Default: None, "induction" or, where `start` is given as "random" or there is nothing to shift,
            "independent".
        ranking_loss_coef: what the ranking losses of the learned scores, summed over the layers, are multiplied with
            before they join the training loss; 0 freezes the scores. Default: 0.1.
        ranking_target: what ranks keys: the "sum" of what later queries make of them, or its "mean". Default: "sum".
    """

    _positive = ["sparse_keys", "sparse_key_dim", "sparse_hash_size"]
    _choices = {
        "sparse_hash": ("argmax", "sign"),
        "sparse_hash_center": (None, "prefix"),
        "sparse_query_init": ("independent", "induction"),
        "ranking_target": ("sum", "mean"),
    }

    sparse_attention: str | list[str | None] | None = None
    sparse_keys: int = 64
    sparse_num_heads: int | None = None
    sparse_key_dim: int = 16
    sparse_hash: str = "argmax"
    sparse_hash_size: int = 64
    sparse_hash_center: str | None = "prefix"
    sparse_gate_init: float | None = None
    sparse_query_init: str | None = None
    ranking_loss_coef: float = 0.1
    ranking_target: str = "sum"

    @property
    def sparse_per_layer(self) -> list[str | None]:
        """The sparse branch of every layer, None for none."""
        return self._per_layer(self.sparse_attention)

    def complete_sparse(self, start: str | None, loudness: float | None) -> None:
        """Fill in how the branches start, beside a recurrence whose `start` was given so, and which is so loud."""
        if self.sparse_query_init is None:
            alone = start == "random" or self.conv_kernel < 2
            self.sparse_query_init = "independent" if alone else "induction"
        if self.sparse_gate_init is None:
            self.sparse_gate_init = 1.0 if loudness is None else loudness

    def check_sparse(self, mixers: Mapping[str, Any]) -> None:
        """The branches can be made, and stand beside layers that can have one; `mixers` are these by their names."""
        self.check_count("sparse_attention")
        if not 0 <= self.ranking_loss_coef < float("inf"):
            raise ValueError(
                f"ranking_loss_coef must be finite and not negative, got {self.ranking_loss_coef}; 0 leaves the loss "
                "out."
            )
        for mixer, branch in zip(self.mixers_per_layer, self.sparse_per_layer):
            if branch is None:
                continue
            if not mixers[mixer].can_branch:
                raise ValueError(
                    f'sparse_attention stands beside recurrent layers, and "{mixer}" is none: give a list with None '
                    "for such layers."
                )
            from .parts import check_parts

            check_parts(self, branch, mixers[mixer].written_shape(self)[0])

    def check_sparse_start(self) -> None:
        """What is asked of its queries at the start can be done."""
        if self.sparse_query_init == "induction" and self.conv_kernel < 2:
            problem = f"shifts keys by a token, which conv_kernel = {self.conv_kernel} cannot"
            raise ValueError(f'sparse_query_init = "induction" {problem}: set it to "independent".')
