"""Fill in the template from a checkpoint: its configuration counts, its reports give the training and the results.

Example:
    card = render(Path("runs/mine"), "user/mine", report=json.loads(Path("runs/mine/results.json").read_text()))
    card.save("runs/mine/README.md")
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, PreTrainedConfig

import modeling_interdomain  # noqa: F401  the import makes the Auto classes know the architecture

TEMPLATE = Path(__file__).with_name("template.md")
# A card with this line is ours to write again; any other card belongs to whoever wrote it.
MARKER = "<!-- examples.publish writes this card anew each time; without this line it keeps what is here. -->"
# What stands between these in somebody's own card was inserted here.
START = "<!-- examples.publish writes this part anew each time; without this line it keeps what is here. -->"
END = "<!-- examples.publish: end -->"
LICENSE = "apache-2.0"
# Where results come from: the harness, or the training run itself, on text that it held out.
HARNESS = {"source_name": "lm-evaluation-harness", "source_url": "https://github.com/EleutherAI/lm-evaluation-harness"}
HELD_OUT = "held-out"

# What the last part of a class's name says it is for, and through which Auto class one loads it.
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "Model": "AutoModel",
}
# Numbers on arXiv of the papers that a card cites: their key and title.
PAPERS = {
    "2605.24330": ("interdomain-attention", "Interdomain Attention: Beyond Token-Level Key-Value Memory"),
    "2405.21060": (
        "mamba-2",
        "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
    ),
    "2312.00752": ("mamba", "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"),
    "2407.16958": (
        "wonderful-matrices",
        "Wonderful Matrices: Combining for a More Efficient and Effective Foundation Model Architecture",
    ),
    "2507.00449": (
        "hax",
        "Overcoming Long-Context Limitations of State-Space Models via Context-Dependent Sparse Attention",
    ),
}
# Figures of a report that are results: the name of the measure.
MEASURES = {"bits_per_byte": "bits per byte", "perplexity": "perplexity", "accuracy": "accuracy"}


def auto_class(config: PreTrainedConfig) -> str:
    """The name of the Auto class that loads what the configuration was saved with."""
    saved = (config.architectures or [""])[0]
    return next((name for ending, name in AUTO_CLASSES.items() if saved.endswith(ending)), "AutoModel")


def pipeline_tag(config: PreTrainedConfig) -> str:
    """The task as the Hub calls it."""
    images = config.patch_size is not None
    return {
        "AutoModelForCausalLM": "text-generation",
        "AutoModelForSequenceClassification": "image-classification" if images else "text-classification",
        "AutoModel": "feature-extraction",
    }[auto_class(config)]


def cited(config: PreTrainedConfig) -> dict[str, tuple[str, str]]:
    """Those of `PAPERS` that describe a part of the model; the first describes the family."""
    parts = {*config.mixers_per_layer, *config.feed_forwards_per_layer}
    rotary = "ssd" in parts and config.rope_placement is not None
    described = {
        "2605.24330": True,
        "2405.21060": "ssd" in parts,
        "2312.00752": "selective_scan" in parts,
        "2407.16958": rotary or bool({"inner_function", "cdmoe"} & parts),
        "2507.00449": any(config.sparse_per_layer),
    }
    return {number: paper for number, paper in PAPERS.items() if described[number]}


def count_parameters(config: PreTrainedConfig) -> int:
    """Of the saved class; no memory is filled."""
    with torch.device("meta"):
        return getattr(transformers, auto_class(config)).from_config(config).num_parameters()


def softmax_size(config: PreTrainedConfig, length: int) -> int:
    """Numbers of the keys and values if all layers were softmax."""
    softmax = deepcopy(config)
    softmax.token_mixers, softmax.sparse_attention = "softmax", None
    return softmax.state_sizes(length)["keys_values"]


def number(report: dict, name: str) -> float | None:
    """A figure of a report; None for whatever is not a number."""
    value = report.get(name)
    return value if is_number(value) else None


def is_number(value: Any) -> bool:
    """Whether a value of a report is a figure; NaN and infinity are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def report_results(report: dict, config: PreTrainedConfig) -> list[EvalResult]:
    """What `results.json` of a training example measured."""
    data = str(report.get("data", "held-out data"))
    return [
        _result(pipeline_tag(config), HELD_OUT, data, name, measure, value)
        for name, measure in MEASURES.items()
        if (value := number(report, name)) is not None
    ]


def harness_results(record: dict) -> list[EvalResult]:
    """What lm-eval measured (its "results" by task), by the tasks' names; standard errors are left out."""
    results = []
    for task, figures in sorted(record["results"].items()):
        items = record.get("n-samples", {}).get(task)
        shots = record.get("n-shot", {}).get(task)
        told, facts = {}, []
        if shots is not None:
            told["num_few_shot"] = shots
            facts.append(f"{shots}-shot")
        if items:
            told["items"] = f"{items['effective']:,} of {items['original']:,}"
            facts.append(f"{told['items']} items")
        data = f"{task} ({', '.join(facts)})" if facts else task
        source: dict[str, Any] = {**HARNESS, "dataset_args": told or None}
        for name, value in figures.items():
            metric, comma, variant = name.partition(",")
            if comma and is_number(value) and not metric.endswith("_stderr"):
                measure = metric if variant == "none" else f"{metric} ({variant})"
                results.append(_result("text-generation", task, data, metric, measure, value, **source))
    return results


def _result(
    task: str, dataset: str, dataset_name: str, metric: str, measure: str, value: float, **source: Any
) -> EvalResult:
    return EvalResult(
        task_type=task,
        dataset_type=dataset,
        dataset_name=dataset_name,
        metric_type=metric,
        metric_name=measure,
        metric_value=float(value),
        **source,
    )


def training_facts(report: dict, datasets: Sequence[str]) -> list[str]:
    """What is known about the training, a line a fact."""
    steps, hours = number(report, "steps"), (number(report, "training_seconds") or 0) / 3600
    tokens = number(report, "tokens") or (steps or 0) * (number(report, "tokens_per_step") or 0)
    facts = {
        "Data": report.get("data"),
        "Datasets": ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in datasets),
        "Steps": f"{steps:,.0f}" if steps else None,
        "Tokens seen": f"{tokens:,.0f}" if tokens else None,
        "Hardware": report.get("hardware"),
        "Time": f"{hours:{',.0f' if hours >= 10 else '.2g'}} hours" if hours else None,
    }
    return [f"{name}: {fact}" for name, fact in facts.items() if fact]


def describe_layers(config: PreTrainedConfig) -> str:
    """For example "12 layers (9 interdomain, 3 softmax)"."""
    counts = Counter(config.mixers_per_layer)
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{config.num_hidden_layers} layers ({kinds if len(counts) > 1 else f'all {next(iter(counts))}'})"


def usage(config: PreTrainedConfig, repo: str) -> str:
    """Lines of Python that a stranger can copy."""
    name = auto_class(config)
    if config.patch_size is not None:
        return f"""from transformers import {name}

model = {name}.from_pretrained("{repo}", trust_remote_code=True).eval()
# logits = model(pixel_values=...).logits with [B, {config.num_channels}, height, width], prepared as in training"""
    lines = [
        f"from transformers import {name}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        f'model = {name}.from_pretrained("{repo}", trust_remote_code=True).eval()',
        'inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)',
    ]
    ending = {
        "AutoModelForCausalLM": [
            "ids = model.generate(**inputs, max_new_tokens=50, do_sample=True, temperature=0.7)",
            "print(tokenizer.decode(ids[0], skip_special_tokens=True))",
        ],
        "AutoModelForSequenceClassification": ["print(model(**inputs).logits.softmax(-1))"],
        "AutoModel": ["print(model(**inputs).last_hidden_state.shape)"],
    }[name]
    return "\n".join(lines + ending)


def render(
    folder: Path,
    repo: str,
    report: dict | None = None,
    results: Sequence[EvalResult] = (),
    language: Sequence[str] = (),
    datasets: Sequence[str] = (),
) -> ModelCard:
    """The card of a saved folder, for a repository "user/name".

    Args:
        folder: what `save_pretrained` wrote.
        repo: where the model will be found.
        report: `results.json` of a training example, if there is one.
        results: further results, for example `harness_results` of a file of lm-eval.
        language: codes of the languages it was trained on.
        datasets: names on the Hub of the data it was trained on.
    """
    config = AutoConfig.from_pretrained(folder)
    report = report or {}
    results = [*report_results(report, config), *results]
    name, length = repo.split("/")[-1], config.max_position_embeddings
    recurrent = "linear_attention" in config.layer_types
    tags = ["linear-attention", "state-space-model"] if recurrent else []
    if "interdomain" in config.mixers_per_layer:
        tags = ["interdomain-attention", *tags]
    papers = cited(config)
    data = ModelCardData(
        license=LICENSE,
        library_name="transformers",
        pipeline_tag=pipeline_tag(config),
        tags=[config.model_type, *tags, *(f"arxiv:{number}" for number in papers)],
        language=list(language) or None,
        datasets=list(datasets) or None,
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=name,
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=TEMPLATE,
        name=name,
        config=config,
        task=data.pipeline_tag,
        recurrent=recurrent,
        mixers=config.mixers_per_layer,
        feed_forwards=config.feed_forwards_per_layer,
        papers=papers,
        layers=describe_layers(config),
        reads_images=config.patch_size is not None,
        parameters=count_parameters(config),
        length=length,
        sizes=config.state_sizes(length),
        softmax_size=softmax_size(config, length),
        usage=usage(config, repo),
        transformers_version=config.transformers_version,
        training=training_facts(report, datasets),
        results=results,
        marker=MARKER,
    )


def complete(card: ModelCard, fresh: ModelCard) -> ModelCard:
    """The card with the metadata and sections that only the fresh one has, and the results of both.

    What was inserted at an earlier time, and results of an earlier time, are replaced: new weights, new figures.
    """
    for name, value in vars(fresh.data).items():
        if value is not None and card.data.get(name) is None:
            card.data[name] = value
    own = [result for result in card.data.eval_results or [] if not is_ours(result)]
    card.data.eval_results = own + (fresh.data.eval_results or []) or None

    before, after = own_text(card.text)
    headings = {line.strip() for line in (before + after).splitlines()}
    sections = [f"## {section.strip()}" for section in fresh.text.replace(MARKER, "").split("\n## ")[1:]]
    missing = [section for section in sections if section.splitlines()[0] not in headings]
    card.text = before + after
    if missing:
        card.text = "\n\n".join([before.rstrip(), START, *missing, END]) + (after or "\n")
    return card


def is_ours(result: EvalResult) -> bool:
    """Whether a result of a card comes from the files that are read again each time."""
    return result.dataset_type == HELD_OUT or result.source_name == HARNESS["source_name"]


def own_text(text: str) -> tuple[str, str]:
    """What stands before and after the sections that `complete` has inserted; without them, all of it and nothing."""
    before, start, rest = text.rpartition(START)
    _, end, after = rest.partition(END)
    return (before, after) if start and end else (text, "")
