"""Adapters of PEFT, beside requests without one: answers are those of Transformers with PEFT."""

import pytest

from tests.conftest import EXPERTS, ROPE
from tests.vllm.engines import assert_answers, engine

MODELS = {
    "interdomain": {},
    "hybrid": {
        "num_hidden_layers": 5,
        "token_mixers": ["interdomain", "ssd", "window", "softmax", "s4d"],
        "feed_forwards": ["mlp", "cdmoe", "mlp", "mlp", "none"],
        "num_key_value_heads": 2,
        "ssd_groups": 2,
        "ssd_state_size": 6,
        "rope_parameters": ROPE,
        "use_output_gate": True,
        **EXPERTS,
    },
}


@pytest.fixture
def adapted(make_folder, tmp_path):
    """`adapted(name of MODELS, targets)`: a model, its folder, and that of an adapter as of examples/finetune_lora.py;
    without targets one of the projections of token mixers."""
    peft = pytest.importorskip("peft", reason="PEFT makes the adapters.")

    def make(name: str, targets: list[str] | str | None):
        model, folder = make_folder("interdomain", **MODELS[name])
        learned = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False
        )
        adapter = peft.get_peft_model(model, learned).eval()
        adapter.save_pretrained(tmp_path / "adapter")
        return adapter, folder, tmp_path / "adapter"

    return make


@pytest.mark.parametrize(
    "name, targets, processes",
    [
        ("interdomain", None, 1),
        ("hybrid", "all-linear", 1),
        pytest.param("hybrid", "all-linear", 2, marks=pytest.mark.slow),
    ],
)
def test_requests_with_an_adapter_and_without(adapted, random_ids, name, targets, processes):
    from vllm.lora.request import LoRARequest

    model, folder, adapter = adapted(name, targets)
    request = LoRARequest("learned", 1, str(adapter))
    asked = {f"text {i}": random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate((23, 1, 40, 9, 31))}
    with engine(folder, enable_lora=True, max_lora_rank=8, tensor_parallel_size=processes) as served:
        for i, (text, prompt) in enumerate(asked.items()):
            served.ask(text, prompt, 6, lora_request=None if i % 2 else request)
            served.step()
        answers = served.finish()
    for i, (text, prompt) in enumerate(asked.items()):
        if i % 2:
            with model.disable_adapter():
                assert_answers(model, prompt, answers[text])
        else:
            assert_answers(model, prompt, answers[text])


def test_adapters_of_other_parts_are_refused(adapted):
    """By vLLM, when it reads them."""
    from vllm.lora.request import LoRARequest

    _, folder, adapter = adapted("interdomain", ["lm_head", "q_proj"])
    with (
        engine(folder, enable_lora=True, max_lora_rank=8) as served,
        pytest.raises(ValueError, match=r"expected target modules in .* but received \['lm_head', 'lm_head'\]"),
    ):
        served.engine.add_lora(LoRARequest("learned", 1, str(adapter)))


def test_lora_is_mended_once():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from vllm_interdomain.adapters import spare_tokens_without_adapter

    spare_tokens_without_adapter()
    once = PunicaWrapperCPU._apply_shrink
    spare_tokens_without_adapter()
    assert PunicaWrapperCPU._apply_shrink is once
