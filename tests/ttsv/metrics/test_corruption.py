import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.lazily import lazily
from ttsv.data import corruptions, generated_corruptions, verify_dataset
from ttsv.data.corruptions import KINDS, CorruptionProtocol, PublishedCorruptions
from ttsv.data.generated_corruptions import GeneratedCorruptions, corrupted
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.corruption import CorruptionProgress, CorruptionRecord, corruption_accuracy, mce

imagecorruptions = lazily("imagecorruptions")
transforms = lazily("torchvision.transforms.functional")

COUNT = 6
"""Test images: each file has five times as many."""


def write_published(folder: Path, count: int = COUNT, classes: int = 10) -> Path:
    """The publisher's layout: one array per kind and the labels, the same test images' five times over."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.tile(rng.integers(0, classes, count, dtype=np.uint8), 5))
    for kind in KINDS:
        np.save(folder / f"{kind}.npy", rng.integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8))
    return folder


def network(classes: int = 10) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(800, classes))


def image_by_image(model: nn.Module, folder: Path, kind: str, severity: int) -> float:
    """Each image decoded and shown alone, in evaluation mode."""
    images, labels = np.load(folder / f"{kind}.npy"), np.load(folder / "labels.npy")
    count = len(labels) // 5
    right = 0
    for row in range((severity - 1) * count, severity * count):
        pixels = transforms.to_tensor(Image.fromarray(images[row]))
        right += int(model(pixels[None]).argmax() == labels[row])
    return right / count


def test_table_and_mean_are_those_of_images_shown_one_by_one(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C")
    model = network().train()
    seen: list[CorruptionProgress] = []
    record = corruption_accuracy(model, folder, batch_size=4, progress=seen.append)
    assert model.training
    model.eval()
    assert sorted(record.table) == sorted(imagecorruptions.get_corruption_names("all"))
    every = []
    for kind, row in record.table.items():
        expected = [image_by_image(model, folder, kind, severity) for severity in range(1, 6)]
        assert row == pytest.approx(expected, abs=1e-12)
        every += expected
    assert record.mean == pytest.approx(math.fsum(every) / 95, abs=1e-12)
    assert len(set(every)) > 1
    assert [step.done for step in seen] == list(range(1, 96))
    assert [(step.kind, step.severity) for step in seen] == [(kind, s) for kind in KINDS for s in range(1, 6)]
    assert seen[-1].seconds_left == 0
    assert record.protocol["images"] == COUNT
    assert record.protocol["corruptions"] == "published"


def test_any_number_of_images_and_batches(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "c", count=3)
    model = network()
    by_one = corruption_accuracy(model, str(folder), batch_size=1)
    at_once = corruption_accuracy(model, PublishedCorruptions(folder, classes=10))
    assert by_one.table == at_once.table


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_array(path: Path) -> None:
    path.write_bytes(b"no array" * 100)


def pickled(path: Path) -> None:
    np.save(path, np.array([{}, []], dtype=object), allow_pickle=True)


def archive(path: Path) -> None:
    array = np.load(path)
    with path.open("wb") as file:
        np.savez(file, array)


def floats(path: Path) -> None:
    np.save(path, np.load(path).astype(np.float32))


def shorter(path: Path) -> None:
    np.save(path, np.load(path)[:-5])


def transposed(path: Path) -> None:
    np.save(path, np.load(path).transpose(0, 3, 1, 2))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("kind", ["brightness", "zoom_blur"])
@pytest.mark.parametrize(
    "damage", [remove, cut, empty, no_array, pickled, archive, floats, shorter, transposed, longer]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], kind: str) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C", count=1)
    damage(folder / f"{kind}.npy")
    with pytest.raises(DataError, match=rf"{kind}\.npy .*zenodo\.org/records/2535967"):
        corruption_accuracy(network(), folder)


@pytest.mark.parametrize("damage", [remove, cut, empty, floats])
def test_damaged_labels_are_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write_published(tmp_path / "CIFAR-100-C", count=1, classes=100)
    damage(folder / "labels.npy")
    with pytest.raises(DataError, match=r"labels\.npy .*zenodo\.org/records/3555552"):
        corruption_accuracy(network(100), folder)


def test_a_missing_folder() -> None:
    with pytest.raises(DataError, match=r"nowhere/labels\.npy is missing"):
        corruption_accuracy(network(), "nowhere")


def test_labels_that_are_not_of_five_severities(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "c", count=1)
    np.save(folder / "labels.npy", np.zeros(6, dtype=np.uint8))
    with pytest.raises(DataError, match="five severities"):
        corruption_accuracy(network(), folder)


def test_a_file_that_was_altered_since_its_first_use_is_named(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C", count=2)
    first = corruption_accuracy(network(), folder)
    noted = json.loads((tmp_path / "CIFAR-10-C.sha256.json").read_text())["files"]
    assert len(noted) == 20
    assert first.protocol["files"] == {Path(name).name: sha256 for name, sha256 in noted.items()}
    assert corruption_accuracy(network(), folder).protocol == first.protocol
    images = np.load(folder / "fog.npy")
    images[3, 2, 1, 0] ^= 1
    np.save(folder / "fog.npy", images)
    with pytest.raises(DataError, match=r"fog\.npy has changed since the set's first use"):
        corruption_accuracy(network(), folder)


def test_the_protocol_is_of_the_files_and_not_of_their_place(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "one", count=1)
    shutil.copytree(folder, tmp_path / "two")
    records = [corruption_accuracy(network(), tmp_path / name) for name in ("one", "two")]
    assert records[0].protocol == records[1].protocol
    assert mce(records[0], records[1]) == 1


def test_labels_that_differ_between_severities_are_named(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C")
    labels = np.load(folder / "labels.npy")
    labels[2 * COUNT + 4] = (labels[4] + 1) % 10
    np.save(folder / "labels.npy", labels)
    with pytest.raises(DataError, match=r"labels\.npy has the label \d for image 4 at severity 3, \d at severity 1"):
        corruption_accuracy(network(), folder)


def test_labels_are_those_of_the_test_images(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C")
    labels = np.load(folder / "labels.npy")[:COUNT].astype(np.int64)
    whole = np.concatenate([labels, labels])
    assert PublishedCorruptions(folder, labels=whole).open().classes == 10
    with pytest.raises(DataError, match=r"labels\.npy has labels of 6 images, the test set has 5"):
        PublishedCorruptions(folder, labels=labels[:5]).open()
    whole[3] = (whole[3] + 1) % 10
    with pytest.raises(DataError, match=r"labels\.npy has the label \d for image 3, whose label in the test set is \d"):
        PublishedCorruptions(folder, labels=whole).open()


def test_the_protocol_says_whether_files_are_the_publishers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_published(tmp_path / "mine")
    assert PublishedCorruptions(folder).open().protocol["publishers_files"] is False
    assert set(corruptions.PUBLISHED["CIFAR-10-C"].md5) == {"labels.npy", *(f"{kind}.npy" for kind in KINDS)}
    assert set(corruptions.PUBLISHED["CIFAR-100-C"].md5) == {"labels.npy", *(f"{kind}.npy" for kind in KINDS)}
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    archive = replace(corruptions.PUBLISHED["CIFAR-10-C"], md5=md5)
    monkeypatch.setitem(corruptions.PUBLISHED, "CIFAR-10-C", archive)
    assert PublishedCorruptions(folder).open().protocol["publishers_files"] is True
    images = np.load(folder / "snow.npy")
    images[0, 0, 0, 0] ^= 1
    np.save(folder / "snow.npy", images)
    (tmp_path / "mine.sha256.json").unlink()
    assert PublishedCorruptions(folder).open().protocol["publishers_files"] is False


def test_published_corruptions_are_verified_by_their_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_published(tmp_path / "datasets" / "CIFAR-10-C", count=1)
    with pytest.raises(DataError, match=r"CIFAR-10-C has other files than the publisher's: download it again from htt"):
        verify_dataset("CIFAR-10-C", tmp_path)
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    archive = replace(corruptions.PUBLISHED["CIFAR-10-C"], md5=md5)
    monkeypatch.setitem(corruptions.PUBLISHED, "CIFAR-10-C", archive)
    record = json.loads((tmp_path / "datasets/CIFAR-10-C.sha256.json").read_text())
    assert verify_dataset("CIFAR-10-C", tmp_path) == record["sha256"]
    with (folder / "snow.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"other")
    with pytest.raises(DataError, match=r"snow\.npy has changed since the set's first use"):
        verify_dataset("CIFAR-10-C", tmp_path)


@pytest.mark.parametrize(("name", "given", "wanted"), [("CIFAR-10-C", 100, 10), ("CIFAR-100-C", 10, 100)])
def test_classes_of_another_archive(tmp_path: Path, name: str, given: int, wanted: int) -> None:
    folder = write_published(tmp_path / name, count=1)
    with pytest.raises(ConfigError, match=f"classes = {given}: must be {wanted}, those of {name}"):
        PublishedCorruptions(folder, classes=given).open()


def test_a_folder_of_another_name_has_no_more_classes_than_its_set(tmp_path: Path) -> None:
    tens = write_published(tmp_path / "tens", count=20)
    with pytest.raises(ConfigError, match=r"must give 10 classes|must give \d+ to 10 classes"):
        corruption_accuracy(network(100), tens)
    assert corruption_accuracy(network(10), tens).mean > 0
    hundred = write_published(tmp_path / "hundred", count=20, classes=100)
    assert corruption_accuracy(network(100), hundred).protocol["images"] == 20
    with pytest.raises(ConfigError, match=r"must give \d+ to 100 classes"):
        corruption_accuracy(network(10), hundred)


@pytest.mark.parametrize(("name", "classes"), [("CIFAR-100-C", 10), ("CIFAR-10-C", 100), ("other", 3)])
def test_classes_that_do_not_match(tmp_path: Path, name: str, classes: int) -> None:
    folder = write_published(tmp_path / name, count=20)
    with pytest.raises(ConfigError) as caught:
        corruption_accuracy(network(classes), folder)
    assert caught.value.field == "model"


def test_labels_of_more_classes_than_the_set_has(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "CIFAR-10-C", count=20, classes=100)
    with pytest.raises(DataError, match="not of 10 classes"):
        corruption_accuracy(network(), folder)


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[4].bias[2] = math.nan  # type: ignore[index]
    with pytest.raises(ConfigError) as caught:
        corruption_accuracy(model, write_published(tmp_path / "c", count=1))
    assert caught.value.field == "model"
    with pytest.raises(ConfigError, match="batch_size"):
        corruption_accuracy(network(), tmp_path / "c", batch_size=0)


def record_of(errors: dict[str, list[float]], **protocol: Any) -> CorruptionRecord:
    table = {kind: [1 - error for error in row] for kind, row in errors.items()}
    return CorruptionRecord(mean=0.0, table=table, protocol=cast(CorruptionProtocol, protocol), seconds=0.0)


def test_mce_is_its_definition() -> None:
    record = record_of({"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": [0.5] * 5}, files="a")
    baseline = record_of({"fog": [0.2, 0.4, 0.6, 0.8, 1.0], "snow": [0.25] * 5}, files="a")
    assert mce(record, baseline) == pytest.approx((0.5 + 2) / 2)
    assert mce(baseline, baseline) == pytest.approx(1)
    stored = CorruptionRecord(**json.loads(json.dumps(asdict(baseline))))
    assert mce(record, stored) == mce(record, baseline)
    with pytest.raises(ConfigError, match="another files"):
        mce(record, record_of({"fog": [0.5] * 5, "snow": [0.5] * 5}, files="b"))
    with pytest.raises(ConfigError, match="snow"):
        mce(record, record_of({"fog": [0.5] * 5, "snow": [0.0] * 5}, files="a"))


def some_images(*shape: int) -> Tensor:
    """Smooth ones, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(shape[0], shape[1], 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, shape[2:], mode="bilinear")


@pytest.mark.slow
def test_generated_corruptions_are_the_librarys_own(tmp_path: Path) -> None:
    images = some_images(2, 3, 32, 32)
    source = GeneratedCorruptions(images, torch.tensor([3, 1]), name="npz:mine", folder=tmp_path, seed=4)
    found = source.open()
    assert found.folder.name.startswith("npz-mine-corrupted-")
    assert found.labels.tolist() == [3, 1] * 5
    levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for kind in ("contrast", "pixelate", "jpeg_compression", "defocus_blur", "saturate"):  # without random numbers
        for row, array in enumerate(found.images(kind)):
            expected = imagecorruptions.corrupt(levels[row % 2], severity=row // 2 + 1, corruption_name=kind)
            assert np.abs(array.astype(int) - expected).max() == 0
    for kind in KINDS:
        distances = np.abs(found.images(kind).astype(float) - np.tile(levels, (5, 1, 1, 1))).mean(axis=(1, 2, 3))
        assert (distances > 0.5).all(), kind
        assert (distances < 128).all(), kind


def test_generated_corruptions_follow_from_their_seed(tmp_path: Path) -> None:
    images, labels = some_images(2, 1, 8, 8), torch.tensor([0, 1])
    kinds: list[tuple[str, int, int]] = []
    sources = [
        GeneratedCorruptions(
            images, labels, name="d", folder=tmp_path / str(n), seed=n // 2, progress=lambda *done: kinds.append(done)
        )
        for n in range(3)
    ]
    state = np.random.get_state()[1].tolist()  # type: ignore[index]
    one, same, other = (source.open() for source in sources)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]
    assert kinds == [(kind, done, 19) for _ in range(3) for done, kind in enumerate(KINDS)]
    for kind in KINDS:
        assert np.array_equal(one.images(kind), same.images(kind)), kind
    assert one.protocol == same.protocol
    assert one.protocol != other.protocol
    for kind in ("gaussian_noise", "impulse_noise", "glass_blur", "snow", "frost", "elastic_transform"):
        assert not np.array_equal(one.images(kind), other.images(kind)), kind
        assert not np.array_equal(one.images(kind)[0], one.images(kind)[1]), kind


def test_generated_corruptions_are_cached_and_checked(tmp_path: Path) -> None:
    images, labels = some_images(2, 1, 8, 8), torch.tensor([0, 1])
    calls: list[str] = []
    source = GeneratedCorruptions(
        images, labels, name="d", folder=tmp_path, classes=10, progress=lambda kind, *_: calls.append(kind)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    first = corruption_accuracy(model, source)
    assert len(calls) == 19
    second = corruption_accuracy(model, source)
    assert len(calls) == 19
    assert (first.table, first.protocol) == (second.table, second.protocol)
    assert first.protocol["corruptions"] == "generated"
    assert first.protocol["enlarged"] == "each pixel as 4 x 4, then the mean of these"
    assert first.protocol["packages"]["imagecorruptions-imaug"]
    assert json.loads(json.dumps(asdict(first))) == asdict(first)
    path = source.open().folder / "frost.npy"
    array = np.load(path)
    array[0, 0, 0, 0] ^= 1
    np.save(path, array)
    with pytest.raises(DataError, match=r"frost\.npy has changed"):
        source.open()
    changed = GeneratedCorruptions(images.flip(0), labels, name="d", folder=tmp_path)
    assert changed.open().folder != path.parent
    with pytest.raises(ConfigError, match="baseline"):
        mce(first, corruption_accuracy(model, changed))


def test_corruptions_are_made_by_one_process_alone_and_what_a_killed_one_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated_corruptions, "_WAIT_SECONDS", 0.0)
    source = GeneratedCorruptions(some_images(2, 1, 8, 8), torch.tensor([0, 1]), name="d", folder=tmp_path)
    making, waiting = source.make(), source.make()
    assert next(making) == (KINDS[0], 0, 19)
    assert [next(waiting) for _ in range(3)] == [(KINDS[0], 0, 19)] * 3
    (half,) = (path for path in tmp_path.iterdir() if path.is_dir())
    shutil.copytree(half, left := half.with_name(half.name + "-left"))  # as SIGKILL leaves it
    making.close()
    assert not half.exists()
    assert len(list(waiting)) == 19, "from the first kind on"
    assert not left.exists()
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert source.open().folder == place
    assert list(source.make()) == []


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (31, 3), (32, 3), (40, 1)])
def test_an_image_comes_back_at_its_own_size(size: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = (some_images(1, channels, size, size)[0] * 255).byte().permute(1, 2, 0).numpy()
    assert corrupted(image, "fog", 3, 0).shape == image.shape
    seen = []

    def nothing(large: Any, **_: Any) -> Any:
        seen.append(large.shape)
        return np.repeat(large, 3 // channels, axis=2)

    monkeypatch.setattr("imagecorruptions.corrupt", nothing)
    assert np.array_equal(corrupted(image, "fog", 3, 0), image), "only the corruption itself may change it"
    assert min(seen[0][:2]) >= 32


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"images": torch.zeros(2, 2, 8, 8)}, "images"),
        ({"images": torch.zeros(2, 3, 8)}, "images"),
        ({"images": torch.zeros(0, 3, 8, 8), "labels": torch.zeros(0, dtype=torch.long)}, "images"),
        ({"images": torch.full((2, 3, 8, 8), 1.5)}, "images"),
        ({"images": torch.full((2, 3, 8, 8), math.nan)}, "images"),
        ({"labels": torch.tensor([0])}, "labels"),
    ],
)
def test_images_that_cannot_be_corrupted(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"images": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([0, 1])} | changed
    with pytest.raises(ConfigError) as caught:
        GeneratedCorruptions(**arguments, name="d", folder=tmp_path)
    assert caught.value.field == field


def test_kinds_are_those_of_the_library() -> None:
    assert sorted(imagecorruptions.get_corruption_names("all")) == list(KINDS)
    assert set(corruptions.PUBLISHED) == {"CIFAR-10-C", "CIFAR-100-C"}
