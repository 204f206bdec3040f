"""Train a classifier that reads images as sequences: the workshop paper's sequential CIFAR-10, or any such table.

Usage:
    python -m examples.classify_images --data cifar10/ --config configuration/workshop-shared-fourier
    python -m examples.classify_images --data cifar10/ --patch-size 4 --steps 500    # 64 tokens an image, not 1024

The data are parquet files with the columns `img` (bytes of an encoded image) and `label`, in files whose names begin
with `train` and `test`. The model is saved so that `AutoModelForSequenceClassification.from_pretrained` loads it.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, set_seed

from examples.saved_model import read_config
from examples.text_data import InputError, check_empty_folder, check_positive, check_seed, exit_code
from examples.training import check_finite, clip_gradients, cosine_with_warmup, parameter_groups, read_recipe

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "sequential-cifar10.yaml"
RECIPE_FIELDS = {"learning_rate", "weight_decay", "recurrence_learning_rate", "recurrence_max_grad_norm"}
RECIPE_FIELDS |= {"batch_size", "warmup", "crop", "flip"}


class Images(NamedTuple):
    """Pixels `[N, 3, height, width]` uint8 and labels `[N]`."""

    pixels: torch.Tensor
    labels: torch.Tensor


def load_images(folder: Path, split: str, limit: int | None = None) -> Images:
    """Decode the images of a split, at most `limit`."""
    import numpy
    from PIL import Image
    from pyarrow import parquet

    files = sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        raise InputError(f"{folder} has no {split}*.parquet; each row of it is an image `img` and a `label`.")
    pixels, labels = [], []
    rows = (row for path in files for row in parquet.read_table(path, columns=["img", "label"]).to_pylist())
    for row in islice(rows, limit):
        image = Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")
        pixels.append(torch.from_numpy(numpy.array(image)).permute(2, 0, 1))
        labels.append(row["label"])
    sizes = {tuple(image.shape[1:]) for image in pixels}
    if len(sizes) != 1:
        raise InputError(f"The {split} images in {folder} have {len(sizes)} sizes; all must have one.")
    return Images(torch.stack(pixels), torch.tensor(labels))


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Bytes to floats of about zero mean and unit variance."""
    return (pixels.float() / 255 - 0.5) / 0.25


def augmented(pixels: torch.Tensor, crop: int, flip: bool, generator: torch.Generator) -> torch.Tensor:
    """Pad each image `[B, C, H, W]` by `crop`, cut it out again at a random place, and mirror half of them."""
    batch, _, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, (crop,) * 4)
    top, left = torch.randint(2 * crop + 1, (2, batch), generator=generator)
    rows = (top[:, None] + torch.arange(height))[:, :, None].expand(-1, -1, width)
    columns = (left[:, None] + torch.arange(width))[:, None].expand(-1, height, -1)
    if flip:
        mirrored = torch.rand(batch, generator=generator) < 0.5
        columns = torch.where(mirrored[:, None, None], columns.flip(2), columns)
    return padded[torch.arange(batch)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


class Step(NamedTuple):
    """One optimiser step: its number from 1, mean loss in nats, images a second."""

    step: int
    loss: float
    images_per_second: float


def train_classifier(model: PreTrainedModel, images: Images, recipe: dict, steps: int, seed: int = 0) -> Iterator[Step]:
    """Train the model in place; a generator of one `Step` a step. `recipe` holds the fields of the YAML file."""
    generator = torch.Generator().manual_seed(seed)
    rate = recipe["learning_rate"]
    groups = parameter_groups(model, rate, recipe["weight_decay"], recipe["recurrence_learning_rate"])
    optimizer = torch.optim.AdamW(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        started = time.perf_counter()
        rows = torch.randint(len(images.labels), (recipe["batch_size"],), generator=generator)
        pixels = augmented(images.pixels[rows], recipe["crop"], recipe["flip"], generator)
        factor = cosine_with_warmup((step + 1) / steps, recipe["warmup"], final=0.0)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * factor
        inputs = normalized(pixels).to(model.device)
        loss = model(pixel_values=inputs, labels=images.labels[rows].to(model.device)).loss
        value = loss.item()
        check_finite(value, step + 1)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(optimizer, recipe.get("max_grad_norm"), recipe["recurrence_max_grad_norm"])
        optimizer.step()
        yield Step(step + 1, value, len(rows) / (time.perf_counter() - started))


@torch.no_grad()
def accuracy(model: PreTrainedModel, images: Images, batch_size: int = 100) -> float:
    """The fraction of the images whose largest logit is the label's."""
    model.eval()
    right = 0
    for pixels, labels in zip(images.pixels.split(batch_size), images.labels.split(batch_size)):
        logits = model(pixel_values=normalized(pixels).to(model.device)).logits
        right += int((logits.argmax(dim=-1).cpu() == labels).sum())
    return right / len(images.labels)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_config = REPOSITORY / "configuration" / "workshop-shared-fourier"
    parser.add_argument("--data", type=Path, required=True, help="folder with train*.parquet and test*.parquet")
    parser.add_argument("--config", type=Path, default=default_config, help="folder (default: %(default)s)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="YAML file (default: %(default)s)")
    parser.add_argument("--patch-size", type=int, help="pixels a side that make one token (default: the config's)")
    parser.add_argument("--steps", type=int, default=10_000, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="use only so many images of each split")
    parser.add_argument("--output", type=Path, default=Path("runs/images"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    return parser.parse_args(arguments)


def image_config(options: argparse.Namespace, images: Images) -> PreTrainedConfig:
    """The configuration for these images: with their number of classes, and patches that cut them up evenly."""
    changes = {} if options.patch_size is None else {"patch_size": options.patch_size}
    config = read_config(options.config, num_labels=int(images.labels.max()) + 1, **changes)
    patch, (height, width) = getattr(config, "patch_size", None), images.pixels.shape[2:]
    if not patch or height % patch or width % patch:
        raise InputError(
            f"The images have {height} x {width} pixels, which the patch size {patch} does not divide: choose "
            "--patch-size."
        )
    return config


def run(options: argparse.Namespace) -> None:
    for path in (options.config / "config.json", options.recipe):
        if not path.is_file():
            raise InputError(f"{path} does not exist.")
    check_positive(options, "steps", "limit", "patch_size")
    check_seed(options.seed)
    check_empty_folder(options.output, "choose another --output")
    train_images, test_images = (load_images(options.data, split, options.limit) for split in ("train", "test"))
    config = image_config(options, train_images)
    recipe = read_recipe(options.recipe)
    missing = sorted(RECIPE_FIELDS - set(recipe))
    if missing:
        raise InputError(f"{options.recipe} does not set {', '.join(missing)}; {RECIPE.name} shows all fields.")
    set_seed(options.seed)
    model = AutoModelForSequenceClassification.from_config(config)
    if torch.cuda.is_available():
        model.cuda()
    tokens = math.prod(train_images.pixels.shape[2:]) // config.patch_size**2 + int(config.use_cls_token)
    print(f"{len(train_images.labels):,} images of {tokens:,} tokens, {model.num_parameters():,} parameters")
    history = []
    with tqdm(total=options.steps, desc="Training", unit="step", dynamic_ncols=True) as bar:
        for step in train_classifier(model, train_images, recipe, options.steps, options.seed):
            history.append(step)
            bar.set_postfix_str(f"loss {step.loss:.3f}, {step.images_per_second:,.0f} images/s", refresh=False)
            bar.update()
    result = {"accuracy": accuracy(model, test_images), "test_images": len(test_images.labels), "steps": options.steps}
    model.save_pretrained(options.output)
    (options.output / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"Accuracy {result['accuracy']:.1%} on {result['test_images']:,} test images; saved {options.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
