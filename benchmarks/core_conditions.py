"""What `core_study` compares: forms of Interdomain and their peers, in language at three sizes and in recall.

Every model has as many parameters as Interdomain without gates, by the width of its feed-forward layers, and every
fixed state as many numbers:

- 1.4M, with the texts and the optimiser of `condition_study`;
- 3M, with those of `larger_study`: bfloat16 products (autocast), 8M tokens, or, which two cores train in an evening,
  the first 2M;
- 12M: 20M tokens of a vocabulary of 8,192, or 60M, drawn from 2.4 times the text.
"""

from typing import NamedTuple

from benchmarks import condition_study, larger_study, peers, recall_study

MAMBA2 = recall_study.MAMBA2 | {"ssd_conv_bias": True, "ssd_norm": "after_gate", "use_output_gate": True}
PLAIN = {"token_mixers": "interdomain", "start": "recall"}
GATES = PLAIN | {"gates": "forget"}
DELTA = GATES | {"delta_rule": True}
# Heads half as wide with half as many modes: a state of as many numbers holds four times as many.
SMALL_HEADS = {"head_dim": 16, "state_size": 16}
MANY = DELTA | SMALL_HEADS
# The two that are asked first and most: our many heads and the better start of Gated DeltaNet.
CLOSEST = MANY_HEADS, SPREAD = "Interdomain, gates and delta rule, many heads", "Gated DeltaNet, steps as Mamba-2's"
GATES_MANY = "Interdomain, gates, many heads"
TWICE = "Interdomain, gates and delta rule, twice the heads"
OUTPUT_GATE = "Interdomain, gates and delta rule, many heads, output gate"
KIMI = "Kimi Delta Attention"
EVEN = "Gated DeltaNet, even steps"
EXPANDED = "Mamba-2, expanded"
ROTARY = "softmax, convolution, RoPE"
NARROW = "Interdomain, gates, narrow heads"


class Condition(NamedTuple):
    """Fields of a configuration, how many times as many heads, the factor of the first outputs of its mixers, and how
    many heads ask one state."""

    fields: dict
    heads: int = 1
    first_output: float = 1.0
    shared: int = 1


CONDITIONS = {
    "Interdomain": Condition(PLAIN),
    "Interdomain, gates": Condition(GATES),
    GATES_MANY: Condition(GATES | SMALL_HEADS, heads=4),
    "Interdomain, gates and delta rule": Condition(DELTA),
    MANY_HEADS: Condition(MANY, heads=4),
    "Gated DeltaNet": Condition(peers.GATED_DELTANET),
    SPREAD: Condition(peers.GATED_DELTANET_SPREAD),
    KIMI: Condition(peers.KIMI_DELTA),
    # Its norm makes outputs of size 1, where Interdomain and S4D-only start with small ones, as `start` "recall" makes
    # them: without the factor its layers hide the embeddings, and it learns slowly.
    "Mamba-2": Condition(MAMBA2, first_output=0.02),
    "S4D-only": Condition({"token_mixers": "s4d", "start": "recall"}),
    "softmax, convolution": Condition(peers.SOFTMAX_CONVOLUTION),
    # SiLU of a linear map of the input, times what the heads answer: the gate of Gated DeltaNet, without its norm.
    OUTPUT_GATE: Condition(MANY | {"use_output_gate": True}, heads=4),
    # Half as wide, with all modes: between the usual heads and many, and a memory as long as that of the usual.
    TWICE: Condition(DELTA | {"head_dim": 16}, heads=2),
    "Interdomain, warp": Condition(PLAIN | {"gates": "warp"}),
    # Keys and values half as wide of twice as many tokens, and four heads that ask for them.
    NARROW: Condition(GATES | {"head_dim": 16, "state_size": 64}, heads=4, shared=4),
    EVEN: Condition(peers.GATED_DELTANET_EVEN),
    # As published: twice as many numbers inside as its layer is wide, each of which keeps half as many.
    EXPANDED: Condition(MAMBA2 | {"head_dim": 32, "ssd_state_size": 64}, heads=2, first_output=0.02),
    ROTARY: Condition(peers.SOFTMAX_CONVOLUTION | {"rope_parameters": recall_study.ROPE}),
}
REFERENCE = "Interdomain"


class Size(NamedTuple):
    """Models of a size, and how they are trained."""

    shape: dict
    training: dict


LANGUAGE, FEWER, LARGER, LARGE = "language", "language, 3M on 2M tokens", "language, 3M", "language, 12M"
MORE = "language, 12M on 60M tokens"
WORDS = {LANGUAGE: "1.4M", FEWER: "3M on 2M tokens", LARGER: "3M", LARGE: "12M", MORE: "12M on 60M tokens"}
LARGER_TRAINING = {name: x for name, x in larger_study.TRAINING.items() if name != "compiled"}
LARGE_SHAPE = condition_study.SHAPE | {
    "vocab_size": 8192,
    "hidden_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
}
LARGE_TRAINING = {"steps": 2441, "batch_size": 16, "sequence_length": 512, "autocast": "bfloat16"}
SIZES = {
    LANGUAGE: Size(condition_study.SHAPE, condition_study.TRAINING),
    FEWER: Size(larger_study.SHAPE, LARGER_TRAINING | {"steps": 1000}),
    LARGER: Size(larger_study.SHAPE, LARGER_TRAINING),
    LARGE: Size(LARGE_SHAPE, LARGE_TRAINING),
    MORE: Size(LARGE_SHAPE, LARGE_TRAINING | {"steps": 7324}),
}
# Of ../shared/data/corpus and, beyond it, corpus_extra, 20 MB of text each, of which windows are drawn.
SHARDS = {LARGE: {"wiki": 3, "books": 2}, MORE: {"wiki": 7, "books": 5}}
RECALL = ("recall", "overwritten", "copying")
SETTINGS = ((8, 64), (16, 128), (32, 256), (64, 512))  # pairs or copied tokens, and tokens
# Of maps of recall's narrow layers where no `start` makes them: of 0.02, 0.05 and 0.1, that with which Gated DeltaNet
# (steps as Mamba-2's) learned most in trials. Mamba-2 learns with those of `recall_study`, and without its gate and the
# norm behind it, and so it is asked; what it learned as it is in language, with the larger maps, is kept as "gated".
RECALL_RANGE = 0.05
ASKED_AS = CONDITIONS | {"Mamba-2": Condition(recall_study.MAMBA2 | {"initializer_range": 0.02})}


def fields_of(condition: str, shape: dict, conditions: dict[str, Condition] = CONDITIONS) -> dict:
    """A configuration of a condition with the parameters of Interdomain, as near as whole widths come."""
    own = conditions[condition]
    heads = own.heads * shape["num_attention_heads"]
    fields = shape | {"num_attention_heads": heads} | own.fields
    if own.shared > 1:
        fields["num_key_value_heads"] = heads // own.shared
    wanted = peers.count(shape | CONDITIONS[REFERENCE].fields)
    return fields | {"intermediate_size": peers.equal_width(fields, wanted)}


def recall_fields(condition: str) -> dict:
    """A configuration of a condition in the recall tasks; without a `start` or a range of its own with larger maps."""
    tokens = {"bos_token_id": None, "eos_token_id": None}
    fields = fields_of(condition, recall_study.SHAPE | {"state_size": recall_study.STATE_SIZE} | tokens, ASKED_AS)
    return fields if "start" in fields else {"initializer_range": RECALL_RANGE} | fields
