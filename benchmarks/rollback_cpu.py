"""What taking tokens back costs, and whether guessing from the prompt pays on a text that repeats itself."""

import copy

import torch

from benchmarks import bf16_cpu
from benchmarks.harness import footnote, in_ms, markdown, time_in_turns, verify_model
from benchmarks.model_cpu import interdomain
from modeling_interdomain import InterdomainCache

# Tokens until the text begins again, tokens to write, and the candidates of one guess.
PERIOD, NEW_TOKENS, CANDIDATES = 48, 96, 10
GUESSED = 5  # as in benchmarks.speculation_study
REQUIRED = {"crop": 1.0, "prompt_lookup": 1.3}


def run(quick: bool = False) -> dict:
    model = interdomain(quick)
    model.generation_config.eos_token_id = None
    record = {"relative_error": verify_model(model)}
    record["crop"] = _crop(model, seconds=0.3 if quick else 20.0)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    record["narrow"] = {"relative_error": verify_model(narrow, bf16_cpu.LARGEST_ERROR)}
    record["narrow"]["crop"] = _crop(narrow, seconds=0.3 if quick else 20.0)
    _repeat_after(model, PERIOD)
    return record | {"generate": _generate(model, seconds=0.3 if quick else 60.0)}


@torch.no_grad()
def _crop(model, seconds: float) -> dict:
    """A decode step; `crop(-5)` of a record of 64 single steps (what refills it is not timed with it); and a guess of
    GUESSED tokens of which one is right, with what takes the others back.
    """
    cache, plain = InterdomainCache(model.config), InterdomainCache(model.config)
    cache.activate_past_recording()
    ids = torch.randint(model.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(1))
    for filled in (cache, plain):
        model(ids, past_key_values=filled, logits_to_keep=1)
        for token in ids[:, :64].split(1, dim=1):
            model(token, past_key_values=filled)

    saved = [layer.recorded for layer in cache.layers]

    def crop():
        for layer, record in zip(cache.layers, saved):
            layer.recorded = record
        cache.crop(-5)

    guessing = InterdomainCache(model.config)
    guessing.activate_past_recording()
    model(ids, past_key_values=guessing, logits_to_keep=1)

    def guess():
        output = model(ids[:, : GUESSED + 1], past_key_values=guessing)
        guessing.crop(1 - GUESSED)
        return output.logits

    functions = {"step": lambda: model(ids[:, :1], past_key_values=plain), "crop": crop, "guess": guess}
    times = time_in_turns(functions, seconds)
    step = times["step"]["median"]
    return {**times, "ratio": times["crop"]["median"] / step, "guess_ratio": times["guess"]["median"] / step}


@torch.no_grad()
def _repeat_after(model, period: int) -> None:
    """Weights that make every token follow the one before it in a circle; each layer still does all its work."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    embeddings = model.get_input_embeddings().weight
    model.lm_head.weight.zero_()
    model.lm_head.weight[:period] = embeddings[:period].roll(1, dims=0)


def _generate(model, seconds: float) -> dict:
    ids = torch.arange(PERIOD)[None].repeat(1, 4)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    outputs = {}

    def write(name, **options):
        outputs[name] = model.generate(ids, **settings, **options)

    functions = {
        "greedy": lambda: write("greedy"),
        "prompt_lookup": lambda: write("prompt_lookup", prompt_lookup_num_tokens=CANDIDATES),
    }
    times = time_in_turns(functions, seconds, at_least=3)
    if not outputs["greedy"].equal(outputs["prompt_lookup"]):
        raise SystemExit("Guessing from the prompt changes what is written: no speed is shown.")
    return {**times, "ratio": times["greedy"]["median"] / times["prompt_lookup"]["median"]}


def table(record: dict) -> str:
    generate = record["generate"]
    rows = []
    for dtype, crop in (("float32", record["crop"]), ("bfloat16", record["narrow"]["crop"])):
        step = "a decode step", in_ms(crop["step"])
        guess = f"a guess of {GUESSED} tokens, {GUESSED - 1} of them wrong, {dtype}"
        rows += [
            [f"`crop(-5)` of 64 recorded steps, {dtype}", in_ms(crop["crop"]), *step, f"{crop['ratio']:.2f} of it"],
            [guess, in_ms(crop["guess"]), *step, f"{crop['guess_ratio']:.2f} of it"],
        ]
    rows += [
        [
            f"{NEW_TOKENS} tokens with prompt lookup, float32",
            in_ms(generate["prompt_lookup"]),
            "greedy",
            in_ms(generate["greedy"]),
            f"{generate['ratio']:.2f}x as fast",
        ],
    ]
    about = (
        f"The 125M shape, batch 1, after 512 and {4 * PERIOD} tokens; the text repeats every {PERIOD} tokens, "
        f"{CANDIDATES} candidates a guess. Required: at most {REQUIRED['crop']:g} of a step, and "
        f"{REQUIRED['prompt_lookup']:g}x."
    )
    return "\n\n".join([markdown(["", "ms", "beside it", "ms", ""], rows), f"{about} {footnote(record)}"])
