"""Classifiers of sequences and images, the Fourier features, and the example that trains them."""

import io
import json
import math
import shutil

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification

from examples import classify_images
from modeling_interdomain import InterdomainForCausalLM, InterdomainForSequenceClassification
from modeling_interdomain.layers import feature_maps
from modeling_interdomain.layers.feature_maps import FourierFeatures

PRESETS = ["shared-fourier", "shared-shifted", "per-head-fourier", "per-head-shifted", "softmax-causal"]
PRESETS += ["softmax-bidirectional"]
IMAGES = {"use_cls_token": True, "patch_size": 2, "num_labels": 3, "num_channels": 3}


@pytest.fixture
def make_classifier(make_model):
    def make(name="fourier", **changes):
        return make_model(name, model_class=InterdomainForSequenceClassification, **IMAGES | changes)

    return make


def pixels(batch=2, size=6, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cosines_and_sines_meet_in_the_learned_kernel(make_config):
    config = make_config("fourier", num_key_value_heads=2)
    features = FourierFeatures(config).double()
    with torch.no_grad():
        features.weights.normal_()
    query, key = torch.randn(1, 5, 4, 8).double(), torch.randn(1, 5, 2, 8).double()
    found = torch.einsum("bthr,bthr->bth", features(query, True), features(key).repeat_interleave(2, dim=2))
    difference = query - key.repeat_interleave(2, dim=2)
    angles = torch.einsum("bthd,hfd->bthf", difference, features.frequencies.repeat_interleave(2, dim=0))
    torch.testing.assert_close(found, (features.weights.softmax(-1) * angles.cos()).sum(-1))
    same = torch.einsum("bthr,bthr->bth", features(query, True), features(query, True))
    assert (same > 0).all() and features(key).shape[-1] == config.feature_dim == 6


def test_shifted_cosines_meet_in_the_kernel_on_average_over_the_phases(make_config):
    features = FourierFeatures(make_config("fourier-shifted", num_attention_heads=1, hidden_size=8)).double()
    query, key = torch.randn(2, 1, 1, 1, 8).double().unbind(0)
    steps = 64
    products = []
    for shift in range(steps):
        with torch.no_grad():
            features.phases.fill_(2 * math.pi * shift / steps)
        products.append((features(query, True) * features(key)).sum())
    angles = torch.einsum("d,gfd->gf", (query - key).flatten(), features.frequencies)
    torch.testing.assert_close(torch.stack(products).mean(), angles.cos().mean())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_the_workshop_paper_train(name):
    config = AutoConfig.from_pretrained(classify_images.REPOSITORY / "configuration" / f"workshop-{name}")
    shape = config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.feature_dim
    assert shape == (4, 4, 128, 32)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    output = model(pixel_values=torch.randn(2, 3, 4, 4), labels=torch.tensor([1, 7]))
    output.loss.backward()
    assert output.logits.shape == (2, 10)
    for parameter_name, parameter in model.named_parameters():
        if "embed_tokens" not in parameter_name:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


def test_without_a_query_fourier_features_have_no_weights_that_nothing_would_teach(make_classifier):
    model = make_classifier("linear-readout", feature_map="fourier", feature_dim=6)
    model(pixel_values=pixels(), labels=torch.tensor([0, 1])).loss.backward()
    unused = [name for name, x in model.named_parameters() if x.grad is None]
    assert unused == ["model.embed_tokens.weight"]


def test_patches_are_read_row_by_row(make_classifier):
    model = make_classifier()
    images = pixels()
    patches = torch.stack([images[:, :, y : y + 2, x : x + 2].flatten(1) for y in (0, 2, 4) for x in (0, 2, 4)], dim=1)
    embedded = model.patches(images)
    torch.testing.assert_close(embedded, model.patches.proj(patches))
    torch.testing.assert_close(model(pixel_values=images).logits, model(inputs_embeds=embedded).logits)


@pytest.mark.parametrize("name", ["fourier", "s4d", "softmax"])
def test_the_learned_token_comes_last_and_heeds_pads(make_classifier, assert_same, name):
    """A row alone equals the same row between pads, on whichever side they are."""
    model = make_classifier(name)
    embedded = torch.randn(1, 5, 32, dtype=torch.float64)
    alone = model(inputs_embeds=embedded).logits
    with_token = torch.cat([embedded, model.cls_token[None, None]], dim=1)
    hidden = model.model(inputs_embeds=with_token).last_hidden_state
    assert_same(alone, model.score(hidden[:, -1]))
    junk = torch.randn(1, 3, 32, dtype=torch.float64)
    for parts, mask in (((junk, embedded), [0] * 3 + [1] * 5), ((embedded, junk), [1] * 5 + [0] * 3)):
        found = model(inputs_embeds=torch.cat(parts, dim=1), attention_mask=torch.tensor([mask])).logits
        assert_same(found, alone)


def test_ids_with_a_learned_token_leave_pads_out(make_classifier, assert_same, random_ids):
    model = make_classifier("interdomain")
    ids = random_ids(1, 6)
    padded = torch.cat([ids, torch.full((1, 2), model.config.pad_token_id)], dim=1)
    assert_same(model(padded).logits, model(ids).logits)


def test_a_bidirectional_model_sees_later_tokens(make_classifier):
    causal, both = (make_classifier("softmax", bidirectional=value, use_cls_token=False) for value in (False, True))
    embedded = torch.randn(1, 5, 32, dtype=torch.float64)
    changed = torch.cat([embedded[:, :-1], embedded[:, -1:] + 1], dim=1)
    for model, moves in ((causal, False), (both, True)):
        first, second = (model.model(inputs_embeds=x).last_hidden_state[:, 0] for x in (embedded, changed))
        assert torch.equal(first, second) is not moves


def test_images_reach_a_model_in_another_dtype(make_classifier):
    model = make_classifier().to(torch.bfloat16)
    assert model(pixel_values=pixels().float()).logits.dtype == torch.bfloat16


def test_a_language_model_becomes_a_classifier_of_images_with_the_same_start_each_time(make_model, tmp_path):
    make_model("fourier").save_pretrained(tmp_path)
    for _ in range(2):
        loaded = InterdomainForSequenceClassification.from_pretrained(tmp_path, patch_size=2)
        assert torch.equal(loaded.patches.proj.bias, torch.zeros(32))


def test_classifiers_save_and_load(make_classifier, tmp_path):
    model = make_classifier()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    # The recurrence stays in float32 whatever dtype a folder is loaded in.
    torch.testing.assert_close(
        loaded(pixel_values=pixels()).logits, model(pixel_values=pixels()).logits, rtol=1e-5, atol=1e-5
    )


MISTAKES = {
    "channels": (lambda model: model(pixel_values=torch.zeros(1, 1, 4, 4)), r"must have shape \[B, 3, height, width\]"),
    "odd size": (lambda model: model(pixel_values=torch.zeros(1, 3, 5, 4)), "cannot be cut into patches of 2"),
    "no size": (lambda model: model(pixel_values=torch.zeros(1, 3, 0, 4)), r"must have shape \[B, 3, height, width\]"),
    "bytes": (
        lambda model: model(pixel_values=torch.zeros(1, 3, 4, 4, dtype=torch.uint8)),
        "pixel_values must be of a floating dtype, .* got torch.uint8",
    ),
    "two inputs": (
        lambda model: model(input_ids=torch.zeros(1, 2, dtype=torch.long), pixel_values=pixels()),
        "exactly one of input_ids, inputs_embeds and pixel_values",
    ),
    "nothing": (lambda model: model(), "exactly one of input_ids, inputs_embeds and pixel_values"),
    "positions": (
        lambda model: model(pixel_values=pixels(), position_ids=torch.arange(9)[None]),
        "use_cls_token reads whole rows",
    ),
    "documents": (
        lambda model: model(pixel_values=pixels(), seq_idx=torch.zeros(2, 9, dtype=torch.int32)),
        "leave past_key_values, position_ids, cu_seq_lens_q and seq_idx out",
    ),
    "long mask": (
        lambda model: model(pixel_values=pixels(), attention_mask=torch.ones(1, 12)),
        r"attention_mask must have shape \[\d+, 9\], one number a token without the learned one, got \[1, 12\]",
    ),
    "numbered mask": (
        lambda model: model(input_ids=torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 2, 2]])),
        "attention_mask",
    ),
    "mask of pairs": (
        lambda model: model(pixel_values=pixels(), attention_mask=torch.ones(1, 1, 9, 9)),
        r"attention_mask must have shape",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(make_classifier, call, message):
    with pytest.raises(ValueError, match=message):
        call(make_classifier())


def test_images_need_a_patch_size_and_language_models_causality(make_classifier, make_config):
    with pytest.raises(ValueError, match="pixel_values need a model with patch_size"):
        make_classifier(patch_size=None)(pixel_values=pixels())
    with pytest.raises(ValueError, match="must not see later tokens"):
        InterdomainForCausalLM(make_config("softmax", bidirectional=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_patches(make_classifier):
    quantize = pytest.importorskip("torch.ao.quantization", reason="this PyTorch quantizes no more").quantize_dynamic
    model = make_classifier().float()
    expected = model(pixel_values=pixels().float()).logits
    quantized = quantize(model, {torch.nn.Linear}, dtype=torch.qint8)
    found = quantized(pixel_values=pixels().float()).logits
    assert (found - expected).std() < 0.1 * expected.std()


# The example.


def write_images(folder, rows=12, size=8, labels=10):
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    for split in ("train", "test"):
        table = []
        for label in range(rows):
            image = Image.new("RGB", (size, size), (20 * label, 0, 255 - 20 * label))
            image.save(file := io.BytesIO(), "PNG")
            table.append({"img": {"bytes": file.getvalue(), "path": None}, "label": label % labels})
        parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{split}.parquet")


def test_images_are_decoded(tmp_path):
    write_images(tmp_path)
    images = classify_images.load_images(tmp_path, "train", limit=5)
    assert images.pixels.shape == (5, 3, 8, 8) and images.labels.tolist() == [0, 1, 2, 3, 4]
    assert images.pixels[2, :, 3, 3].tolist() == [40, 0, 215]
    shutil.copy(tmp_path / "train.parquet", tmp_path / "train-1.parquet")
    assert len(classify_images.load_images(tmp_path, "train", limit=5).labels) == 5
    assert len(classify_images.load_images(tmp_path, "train").labels) == 24
    with pytest.raises(classify_images.InputError, match="has no validation"):
        classify_images.load_images(tmp_path, "validation")
    (tmp_path / "other").mkdir()
    write_images(tmp_path / "other", size=4)
    shutil.copy(tmp_path / "other" / "train.parquet", tmp_path / "train-2.parquet")
    with pytest.raises(classify_images.InputError, match="have 2 sizes; all must have one"):
        classify_images.load_images(tmp_path, "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "is not empty: choose another --output."),
        (["--output", "{tmp}/train.parquet/deep"], "train.parquet is a file, not a folder."),
        (["--patch-size", "-8"], "--patch-size must be positive, not -8."),
        (["--seed", "-1"], "--seed must be from 0 to 4,294,967,295, not -1."),
    ],
)
def test_a_saved_model_is_not_written_over(tmp_path, capsys, given, message):
    write_images(tmp_path)
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path), "--steps", "1"]
    assert classify_images.main([*arguments, *(x.format(tmp=tmp_path) for x in given)]) == 2
    assert capsys.readouterr().err.rstrip().endswith(message)


def test_augmentation_moves_and_mirrors_whole_images():
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(classify_images.augmented(images, 0, False, generator), images)
    seen = set()
    for _ in range(60):
        moved = classify_images.augmented(images, 1, True, generator)[0]
        padded = torch.nn.functional.pad(images[0], (1,) * 4)
        for top in range(3):
            for left in range(3):
                piece = padded[:, top : top + 4, left : left + 4]
                seen |= {(top, left, flip) for flip in (0, 1) if torch.equal(moved, piece.flip(2) if flip else piece)}
    assert len(seen) == 18


def test_the_recipe_is_the_papers():
    recipe = yaml.safe_load(classify_images.RECIPE.read_text())
    assert (recipe["learning_rate"], recipe["weight_decay"], recipe["recurrence_max_grad_norm"]) == (3e-4, 0.01, 5.0)
    config = AutoConfig.from_pretrained(classify_images.REPOSITORY / "configuration" / "workshop-per-head-fourier")
    model = AutoModelForSequenceClassification.from_config(config)
    groups = classify_images.parameter_groups(model, 3e-4, recipe["weight_decay"], recipe["recurrence_learning_rate"])
    decay = {group["name"]: group["weight_decay"] for group in groups}
    assert decay == {"weights": 0.01, "vectors": 0.0, "recurrence": 0.0}


def test_the_example_trains_saves_and_measures(tmp_path, capsys):
    write_images(tmp_path, labels=3)
    arguments = ["--data", str(tmp_path), "--steps", "3", "--patch-size", "2", "--output", str(tmp_path / "model")]
    assert classify_images.main(arguments) == 0
    assert "12 images of 17 tokens" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.num_labels == 3
    found = classify_images.accuracy(model, classify_images.load_images(tmp_path, "test"))
    assert json.loads((tmp_path / "model" / "results.json").read_text())["accuracy"] == found


def test_the_example_names_mistakes(tmp_path, capsys):
    assert classify_images.main(["--data", str(tmp_path)]) == 2
    assert "has no train*.parquet" in capsys.readouterr().err
    assert classify_images.main(["--data", str(tmp_path), "--steps", "0"]) == 2
    assert "--steps must be positive, not 0." in capsys.readouterr().err
    assert classify_images.main(["--data", str(tmp_path), "--config", "nowhere"]) == 2
    assert "nowhere/config.json does not exist" in capsys.readouterr().err
    write_images(tmp_path)
    assert classify_images.main(["--data", str(tmp_path), "--patch-size", "3"]) == 2
    assert "8 x 8 pixels, which the patch size 3 does not divide" in capsys.readouterr().err
    text_model = classify_images.REPOSITORY / "configuration" / "interdomain-tiny"
    assert classify_images.main(["--data", str(tmp_path), "--config", str(text_model)]) == 2
    assert "which the patch size None does not divide: choose --patch-size" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("learning_rate: 1.0\n")
    assert classify_images.main(["--data", str(tmp_path), "--recipe", str(tmp_path / "recipe.yaml")]) == 2
    assert "does not set batch_size, crop, flip, recurrence_learning_rate" in capsys.readouterr().err


def test_fourier_features_start_as_wide_as_softmax(make_config):
    torch.manual_seed(0)
    config = make_config("fourier-shifted", hidden_size=256, num_key_value_heads=4, feature_dim=512)
    features = feature_maps.FourierFeatures(config)
    torch.testing.assert_close(features.frequencies.std().item(), 64**-0.25, rtol=0.02, atol=0)
    assert 6.2 < features.phases.max() < 6.2832 and 0 <= features.phases.min() < 0.1


def test_a_learned_token_leaves_no_cache(make_model, random_ids):
    """It stands last, so nothing could go on behind it."""
    model = make_model("interdomain", InterdomainForSequenceClassification, num_labels=3, use_cls_token=True)
    assert model(random_ids(2, 5), use_cache=True).past_key_values is None


def test_a_loss_of_ones_own_for_classes_takes_no_number(make_model, random_ids):
    model = make_model("interdomain", InterdomainForSequenceClassification, num_labels=3)

    def own(logits, labels, pooled_logits, config):
        return pooled_logits.sum()

    model.loss_function = own
    assert model(random_ids(2, 5), labels=torch.tensor([0, 1])).loss.isfinite()


def test_the_trainer_divides_the_loss_of_a_classifier_itself():
    assert InterdomainForSequenceClassification.accepts_loss_kwargs is False


def test_the_learned_token_starts_as_an_embedding(make_config):
    torch.manual_seed(0)
    model = InterdomainForSequenceClassification(make_config(hidden_size=256, use_cls_token=True))
    torch.testing.assert_close(model.cls_token.std().item(), model.config.initializer_range, rtol=0.15, atol=0)


def test_a_bidirectional_model_makes_no_cache(make_model, random_ids):
    model = make_model("softmax", InterdomainForSequenceClassification, bidirectional=True, num_labels=3)
    assert model(random_ids(2, 5), use_cache=True).past_key_values is None
