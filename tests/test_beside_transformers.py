"""What examples/long-texts.md says of Mamba-2 in the library itself, where it can be checked here, and of ours."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

pytestmark = pytest.mark.skipif(not version("transformers").startswith("5.23"), reason="the table is of 5.23")
SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
NO_END = {"bos_token_id": None, "eos_token_id": None}


@pytest.fixture(params=["theirs", "ours"])
def model(request):
    torch.manual_seed(0)
    if request.param == "theirs":
        shape = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
        return Mamba2ForCausalLM(Mamba2Config(**SHAPE, **NO_END, **shape)).eval()
    shape = {"num_attention_heads": 2, "state_size": 8, "start": "random", "initializer_range": 0.2}
    return InterdomainForCausalLM(InterdomainConfig(**SHAPE, **NO_END, **shape)).eval()


def is_ours(model) -> bool:
    return isinstance(model, InterdomainForCausalLM)


@pytest.fixture
def ids():
    return torch.randint(1, 64, (1, 20), generator=torch.Generator().manual_seed(1))


def cache_of(outputs):
    return getattr(outputs, "cache_params", None) or outputs.past_key_values


def read_on(model, ids, cache):
    name = "past_key_values" if is_ours(model) else "cache_params"
    return model(ids, use_cache=True, **{name: cache})


def test_guessing_ahead(model, ids):
    settings = {"max_new_tokens": 5, "do_sample": False}
    ids = ids[:, :4].repeat(1, 3)
    if is_ours(model):
        guessed = model.generate(ids, **settings, prompt_lookup_num_tokens=3)
        assert torch.equal(guessed, model.generate(ids, **settings))
    else:
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(ids, **settings, prompt_lookup_num_tokens=3)


@torch.no_grad()
def test_tokens_taken_back(model, ids):
    """Four more than the prompt, two of them taken back; then one that is read as if these had not been."""
    cache = cache_of(model(ids[:, :10], use_cache=True))
    if not is_ours(model):
        assert not cache.layers[0].is_croppable
        return
    cache.activate_past_recording()
    read_on(model, ids[:, 10:14], cache)
    cache.crop(-2)
    error = (read_on(model, ids[:, 12:13], cache).logits - model(ids[:, :13]).logits[:, -1:]).abs().max()
    assert error < 1e-4


@torch.no_grad()
def test_pads_after_the_prompt(model, ids):
    mask = (torch.arange(20) < 12).long()[None]
    padded, alone = (
        cache_of(model(x, **y, use_cache=True)) for x, y in ((ids, {"attention_mask": mask}), (ids[:, :12], {}))
    )
    after = [read_on(model, ids[:, 12:13], cache).logits for cache in (padded, alone)]
    error = (after[0] - after[1]).abs().max()
    assert error < 1e-4 if is_ours(model) else error > 1e-3


@torch.no_grad()
def test_packed_documents(model, ids):
    positions = (torch.arange(20) % 10)[None]
    error = (model(ids, position_ids=positions).logits[:, 10:] - model(ids[:, 10:]).logits).abs().max()
    assert error < 1e-4 if is_ours(model) else error > 1e-3


def test_continuous_batching(model, ids):
    prompts = [ids[0, :5].tolist(), ids[0, 5:12].tolist()]
    if is_ours(model):
        assert len(model.generate_batch(prompts, max_new_tokens=3)) == 2
    else:
        with pytest.raises((ValueError, NotImplementedError)):
            model.generate_batch(prompts, max_new_tokens=3)


@torch.no_grad()
def test_maps_and_files(model, ids, tmp_path):
    found = model(ids, output_attentions=True, use_cache=True)
    assert (getattr(found, "attentions", None) is not None) == is_ours(model)
    assert hasattr(cache_of(found), "save") == is_ours(model)


def test_heads_over_several_processes(model):
    assert bool(model.config.base_model_tp_plan) == is_ours(model)


def test_where_the_librarys_engine_stops(monkeypatch):
    """An allocator for states can be added, but what prepares the batch counts keys for two kinds of layers alone."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache, input_outputs

    config = InterdomainConfig(**SHAPE, num_attention_heads=2, attn_implementation="paged|flash_attention_2")
    with pytest.raises(ValueError, match="Invalid layer type: linear_attention"):
        cache.group_layers_by_attn_type(config)
    monkeypatch.setitem(cache.ATTN_TYPE_TO_ALLOCATOR, "linear_attention", object)
    assert cache.group_layers_by_attn_type(config) == {"linear_attention": [0, 1]}
    allocator = SimpleNamespace(write_trash_index=0, read_trash_index=0, get_seqlen_k=lambda past, query: past + query)
    held = SimpleNamespace(
        cache_allocators={"linear_attention": allocator},
        max_batch_tokens=8,
        max_tokens_read=8,
        max_blocks_per_request=0,
    )
    nothing = SimpleNamespace(tensors_required=0, fill_defaults=lambda tensor: None)
    options = ContinuousBatchingConfig(max_requests_per_batch=2, use_cuda_graph=False)
    prepared = input_outputs.ContinuousBatchingIOs(held, config, options, torch.device("cpu"), torch.float32, nothing)
    assert prepared.cumulative_seqlens_k == {}
    state = SimpleNamespace(position_offset=0, tokens_to_process=[1], request_id="r")
    request = SimpleNamespace(state=state, query_length=1, has_new_token=True)
    with pytest.raises(KeyError, match="linear_attention"):
        prepared.prepare_batch_tensors([request], nothing, False, 1, 0, False)
