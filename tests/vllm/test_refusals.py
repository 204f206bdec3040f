"""What is not served is refused in one sentence, before an engine is started."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_interdomain import InterdomainModel
from tests.conftest import LENGTHENED, edit_config
from tests.vllm.engines import start

PARTS = {
    "inner-function": ("its token_mixers name inner_function, and it serves interdomain, s4d", {"head_dim": 8}),
    "hax": ("its sparse_attention keeps a memory of its own", {}),
    "value-mask": ("dynamic_mask weighs keys", {}),
    "interdomain": ("learned_state begins each text", {"learned_state": True}),
    "warped-time": ('gates = "warp" is a control for studies', {}),
    "softmax": ("rope_type 'dynamic' turns keys again", {"rope_parameters": LENGTHENED["dynamic"]}),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_not_served(make_folder, name):
    sentence, changes = PARTS[name]
    _, folder = make_folder(name, **changes)
    with pytest.raises(ValueError, match=f"vllm_interdomain does not serve .*: {sentence}"):
        start(folder)


def test_feed_forwards_that_are_not_served(make_folder):
    _, folder = make_folder("interdomain")
    edit_config(folder, feed_forwards="mine")
    with pytest.raises(ValueError, match="feed_forwards must be made of mlp, cdmoe, none or what"):
        start(folder)


def test_heads_that_cannot_be_shared_out(make_folder):
    _, folder = make_folder("selective-scan")
    with pytest.raises(ValueError, match="tensor_parallel_size = 2 cannot share out its heads, because"):
        start(folder, tensor_parallel_size=2)


GUESSES = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
ENGINES = {
    "leave speculative_config out": {"speculative_config": GUESSES},
    "leave pipeline_parallel_size at 1": {"pipeline_parallel_size": 2},
    "runner 'pooling' does not": {"runner": "pooling"},
}


@pytest.mark.parametrize("sentence", ENGINES)
def test_engines_that_it_is_not_served_by(make_folder, sentence):
    _, folder = make_folder()
    with pytest.raises(ValueError, match=f"vllm_interdomain does not serve .*{sentence}"):
        start(folder, **ENGINES[sentence])


def test_a_model_without_a_head(make_folder):
    _, folder = make_folder()
    InterdomainModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ValueError, match="it generates text, and InterdomainModel with runner 'pooling' does not"):
        start(folder)


def test_heads_that_the_attention_of_a_cpu_does_not_have(make_folder):
    _, folder = make_folder("interdomain-softmax", head_dim=24)
    with pytest.raises(ValueError, match="has heads of 32, 64, .* numbers, and head_dim is 24"):
        start(folder)
    _, folder = make_folder("interdomain", head_dim=24)
    start(folder)


def test_weights_quantized_in_another_way(make_folder):
    _, folder = make_folder()
    edit_config(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(ValueError, match='weights quantized by "fp8" have not been seen to work in it'):
        start(folder)


def test_adapters_of_maps_that_see_a_part_of_a_batch(make_folder):
    _, folder = make_folder("selective-scan")
    with pytest.raises(ValueError, match="selective_scan layers have maps of a part of a batch"):
        start(folder, enable_lora=True)


def test_nothing_is_compiled_or_captured(make_folder):
    """Whatever an engine asks for: its tokens go through Python that looks at their number."""
    from vllm.config import CompilationMode, CUDAGraphMode

    _, folder = make_folder("interdomain")
    config = start(folder, enforce_eager=False, compilation_config={"mode": 3, "cudagraph_mode": "FULL"})
    assert config.model_config.enforce_eager
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE


def test_another_architecture_is_left_to_vllm(tmp_path):
    """A Llama is read as ever; one that calls itself ours is refused."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=48, **sizes)).save_pretrained(tmp_path)
    start(tmp_path)
    edit_config(tmp_path, architectures=["InterdomainForCausalLM"])
    with pytest.raises(ValueError, match="its model_type is 'llama', and this plugin knows \"interdomain\" alone"):
        start(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "missing", "other shape", "unknown", "twice", "coded"])
def test_broken_checkpoints(make_folder, damage):
    _, folder = make_folder()
    file, name = folder / "model.safetensors", "model.layers.1.token_mixer.recurrence.log_dt"
    tensors = load_file(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
        sentence = "has model.safetensors that cannot be read: copy or download again"
    elif damage == "missing":
        sentence = f"it lacks {name}."
        save_file({key: x for key, x in tensors.items() if key != name}, file)
    elif damage == "other shape":
        sentence = rf"it has {name} of shape \[3\] instead of \[4\]"
        save_file(tensors | {name: torch.zeros(3)}, file)
    elif damage == "twice":
        sentence = f"has {name} in old.safetensors and in another file: keep one"
        save_file({name: tensors[name]}, folder / "old.safetensors")
    elif damage == "coded":
        sentence = f"it has {name} in I8 and no scale for it"
        save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    else:
        sentence = "it has model.layers.9.norm.weight, which no part of the model reads"
        save_file(tensors | {"model.layers.9.norm.weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=sentence):
        start(folder)


def test_what_is_served_starts(make_folder):
    """And no graph of it is captured, since none was seen to work."""
    _, folder = make_folder("interdomain-softmax")
    assert start(folder).model_config.enforce_eager


def test_a_bidirectional_model_is_refused(make_folder):
    _, folder = make_folder("softmax")
    edit_config(folder, bidirectional=True)
    with pytest.raises(ValueError, match="a bidirectional model generates nothing"):
        start(folder)


def test_a_later_layer_that_is_not_served(make_folder):
    layers = ["interdomain", "interdomain", "inner_function"]
    _, folder = make_folder("inner-function", token_mixers=layers, dynamic_mask=None, head_dim=8)
    with pytest.raises(ValueError, match="its token_mixers name inner_function"):
        start(folder)


def test_weights_that_are_not_read_are_not_looked_at(make_folder):
    _, folder = make_folder()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file)
    start(folder, load_format="dummy")


def test_a_tied_head_may_be_in_the_file(make_folder):
    _, folder = make_folder(tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    start(folder)
