import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from ttsv.data import list_datasets, load_dataset, pictures, verify_dataset
from ttsv.data.facts import own_info
from ttsv.errors import DataError

RANDOM = np.random.default_rng(3)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 3) -> NDArray[np.int64]:
    return np.arange(count) % classes


def save(folder: Path, name: str = "mine", **arrays: Any) -> Path:
    path = folder / "datasets" / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)
    return path


# --- npz ---


def test_archive_with_a_test_set(tmp_path: Path) -> None:
    x, test = pixels(30, 2, 6, 6), pixels(9, 2, 6, 6)
    save(tmp_path, x_train=x, y_train=labels(30), x_test=test, y_test=labels(9))
    data = load_dataset("npz:mine", tmp_path)
    assert (data.info.name, data.info.classes, data.info.channels, data.info.image_size) == ("npz:mine", 3, 2, 6)
    assert data.info.mean == data.info.std == (0.5, 0.5)
    assert data.info.dims == 2
    assert np.array_equal(data.test.images.numpy(), test)
    assert data.test.labels.tolist() == labels(9).tolist()
    assert data.split["test"] == "published"
    assert data.split["images"] == {"train": 27, "validation": 3, "test": 9}
    assert sorted(map(bytes, torch.cat([data.train.images, data.validation.images]).flatten(1).numpy())) == sorted(
        map(bytes, x.reshape(30, -1))
    )


def test_archive_without_a_test_set_is_split(tmp_path: Path) -> None:
    save(tmp_path, x_train=pixels(40, 1, 5, 5), y_train=labels(40, 4).astype(np.uint8))
    data = load_dataset("npz:mine", tmp_path)
    assert data.split["images"] == {"train": 28, "validation": 4, "test": 8}
    assert own_info("npz:mine", tmp_path) == data.info
    assert data.train.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("layout", "dims"), [("NCW", 1), ("NWC", 1), ("NCHW", 2), ("NHWC", 2), ("NCDHW", 3), ("NDHWC", 3), (None, 2)]
)
@pytest.mark.parametrize("dtype", ["u1", "<f4", ">f4"])
def test_layouts_and_types(tmp_path: Path, layout: str | None, dims: int, dtype: str) -> None:
    x = pixels(30, 4, *[4] * dims)  # as many channels as rows: a shape does not say which axis they are
    if dtype != "u1":
        x = (x / np.float32(255)).astype(dtype)
    stored = np.moveaxis(x, 1, -1) if layout and layout.endswith("C") else x
    entries: dict[str, Any] = {} if layout is None else {"layout": np.array(layout)}
    save(tmp_path, x_train=stored, y_train=labels(30), x_test=stored[:3], y_test=labels(3), **entries)
    data = load_dataset("npz:mine", tmp_path)
    assert data.info.dims == dims
    assert data.test.images.dtype == (torch.uint8 if dtype == "u1" else torch.float32)
    assert np.array_equal(data.test.images.numpy(), x[:3])
    assert own_info("npz:mine", tmp_path) == data.info


GOOD: dict[str, Any] = {"x_train": pixels(30, 2, 6, 6), "y_train": labels(30)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"y_train": None}, "lacks y_train; it has x_train"),
    "no test labels": ({"x_test": pixels(3, 2, 6, 6)}, "lacks y_test"),
    "no test images": ({"y_test": labels(3)}, "lacks x_test"),
    "other test type": ({"x_test": np.zeros((3, 2, 6, 6), np.float32), "y_test": labels(3)}, "another type"),
    "other test shape": ({"x_test": pixels(3, 2, 5, 5), "y_test": labels(3)}, "another type or image shape"),
    "int images": ({"x_train": np.zeros((30, 2, 6, 6), np.int32)}, "int32; it must be uint8, or float32"),
    "double images": ({"x_train": np.zeros((30, 2, 6, 6))}, "float64; it must be uint8, or float32"),
    "values above one": ({"x_train": np.full((30, 2, 6, 6), 255, np.float32)}, r"outside \[0, 1\]"),
    "not a number": ({"x_train": np.full((30, 2, 6, 6), np.nan, np.float32)}, r"outside \[0, 1\]"),
    "flat images": ({"x_train": pixels(30, 36)}, r"shape \(30, 36\)"),
    "oblong images": ({"x_train": pixels(30, 2, 6, 5)}, "must be square"),
    "channels last": ({"x_train": pixels(30, 6, 6, 1)}, r"second: \(30, 1, 6, 6\); use x.transpose\(0, 3, 1, 2\)"),
    "of volumes": ({"x_train": pixels(30, 4, 4, 4, 3)}, r"use x.transpose\(0, 4, 1, 2, 3\)"),
    "unknown layout": ({"layout": np.array("CHWN")}, "layout 'CHWN' must be one of NCHW, NHWC"),
    "layout of other dims": ({"layout": np.array("NCW")}, "layout 'NCW' must be one of NCHW, NHWC"),
    "too few labels": ({"y_train": labels(29)}, r"one whole number per image, \(30,\)"),
    "one-hot labels": ({"y_train": np.eye(30, dtype=int)}, "one whole number per image"),
    "real labels": ({"y_train": labels(30).astype(float)}, "float64 of shape"),
    "negative labels": ({"y_train": labels(30) - 1}, "labels outside 0 to"),
    "labels without end": ({"y_train": labels(30) * 10_000}, "20001 classes; there must be 2 to 10000"),
    "no pixels": ({"x_train": pixels(30, 2, 0, 0)}, r"shape \(30, 2, 0, 0\): its images have no pixels"),
    "no channels": ({"x_train": pixels(30, 0, 6, 6)}, "its images have no pixels"),
    "a class to test alone": ({"x_test": pixels(3, 2, 6, 6), "y_test": labels(3) + 1}, "the label 3, which y_train"),
    "no images": ({"x_train": pixels(0, 2, 6, 6), "y_train": labels(0)}, "for 0 labels"),
    "too few images": ({"x_train": pixels(4, 2, 6, 6), "y_train": labels(4)}, "has too few images"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    save(tmp_path, **{name: value for name, value in {**GOOD, **changes}.items() if value is not None})
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=message):
            call("npz:mine", tmp_path)
    if case not in ("values above one", "not a number"):  # which headers do not show
        with pytest.raises(DataError, match=message):
            own_info("npz:mine", tmp_path)
    assert not list((tmp_path / "datasets").glob("*.sha256.json"))
    assert [listed.info for listed in list_datasets(tmp_path) if listed.name == "npz:mine"] == [None]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, x_train=np.array([Bomb()] * 30), y_train=labels(30))
    with pytest.raises(DataError, match=f"{path} is no whole archive of plain arrays: .* nothing is unpickled"):
        load_dataset("npz:mine", tmp_path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=f"{path} is no whole archive"):
        load_dataset("npz:mine", tmp_path)


def test_nobody_is_told_to_load_what_is_no_archive_unsafely(tmp_path: Path) -> None:
    path = save(tmp_path, **GOOD)
    for content in (b"junk" * 1000, b"junk" + path.read_bytes()):
        path.write_bytes(content)
        for call in (load_dataset, verify_dataset):
            with pytest.raises(DataError, match=f"{path} is no whole archive of plain arrays: ") as refused:
                call("npz:mine", tmp_path)
            assert "allow_pickle" not in str(refused.value)
    path.write_bytes(b"junk" * 1000)
    for look in (load_dataset, own_info):
        with pytest.raises(DataError, match="is no whole archive of plain arrays: File is not a zip file"):
            look("npz:mine", tmp_path)


@pytest.mark.parametrize("at", [0.02, 0.3, 0.6, 0.99])
def test_cut_or_altered_archive_is_named(tmp_path: Path, at: float) -> None:
    path = save(tmp_path, **GOOD)
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content))])
    with pytest.raises(DataError, match=f"{path} is no whole archive"):
        load_dataset("npz:mine", tmp_path)
    path.write_bytes(content)
    load_dataset("npz:mine", tmp_path)
    middle = int(at * len(content))
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=f"{path} has changed since the set's first use"):
            call("npz:mine", tmp_path)


def test_archive_that_claims_more_than_any_memory(tmp_path: Path) -> None:
    header = np.lib.format.header_data_from_array_1_0(GOOD["x_train"]) | {"shape": (10**17, 2, 6, 6)}
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, header)
    path = save(tmp_path, y_train=labels(30))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", buffer.getvalue())
    for call in (load_dataset, own_info):
        with pytest.raises(DataError, match=f"{path} is no whole archive of plain arrays"):
            call("npz:mine", tmp_path)


HEADERS = {
    "nested without end": b"(" * 9000,
    "none": b"",
    "no shape": b"{'descr': '|u1', 'fortran_order': False, 'shape': 'abc'}",
    "a negative size": b"{'descr': '|u1', 'fortran_order': False, 'shape': (-30, 2, 6, 6)}",
    "a size of many digits": b"{'descr': '|u1', 'fortran_order': False, 'shape': (30, 2, 6, " + b"9" * 5000 + b")}",
    "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (30, 2, 6, 6)}",
    "too long": b" " * 60_000,
    "no numbers": b"{'descr': '|u1', 'fortran_order': False, 'shape': \1: \2}",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_are_none(tmp_path: Path, header: str) -> None:
    path, text = save(tmp_path, y_train=labels(30)), HEADERS[header]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + bytes(9000))
    for call in (load_dataset, own_info):
        with pytest.raises(DataError, match=f"{path} is no whole archive of plain arrays") as refused:
            call("npz:mine", tmp_path)
        assert "allow_pickle" not in str(refused.value)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "datasets").mkdir()
    make(tmp_path / "datasets" / "mine.npz")
    with pytest.raises(FileNotFoundError):
        own_info("npz:mine", tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_damaged_compression_is_named(tmp_path: Path, method: int) -> None:
    path = save(tmp_path, y_train=labels(30))
    buffer = io.BytesIO()
    np.save(buffer, GOOD["x_train"])
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr("x_train.npy", buffer.getvalue())
        start = archive.infolist()[-1].header_offset + 30 + len("x_train.npy")
    assert own_info("npz:mine", tmp_path) == load_dataset("npz:mine", tmp_path).info
    (tmp_path / "datasets" / "npz-mine.sha256.json").unlink()
    content = path.read_bytes()
    for at in range(start + 9, start + 40):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with pytest.raises(DataError, match=f"{path} is no whole archive"):
            load_dataset("npz:mine", tmp_path)


def test_array_that_is_no_archive(tmp_path: Path) -> None:
    path = save(tmp_path, **GOOD)
    buffer = io.BytesIO()
    np.save(buffer, GOOD["x_train"])
    path.write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="no whole archive"):
        load_dataset("npz:mine", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing: save it there with"):
        load_dataset("npz:mine", tmp_path)


def test_own_sets_are_listed(tmp_path: Path) -> None:
    save(tmp_path, **GOOD)
    save(tmp_path, "not a name", **GOOD)
    draw(tmp_path, "train", "cat", "a.png", pixels(4, 4))
    listed = {entry.name: entry for entry in list_datasets(tmp_path)}
    assert {name for name in listed if ":" in name} == {"npz:mine", "folder:pets"}
    assert listed["npz:mine"][1:3] == (None, None)
    data = load_dataset("npz:mine", tmp_path)
    listed = {entry.name: entry for entry in list_datasets(tmp_path)}
    assert listed["npz:mine"][1:3] == (data.info, data.sha256)


# --- folders ---


def draw(folder: Path, part: str, label: str, file: str, image: NDArray[np.uint8], mode: str | None = None) -> Path:
    path = folder / "datasets" / "pets" / part / label / file
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Image.fromarray(image)
    (made if mode is None else made.convert(mode)).save(path)
    return path


def pets(folder: Path, *channels: int, test: bool = True) -> dict[str, NDArray[np.uint8]]:
    drawn = {}
    for label in ("cat", "dog", "ant"):
        for number in range(10):
            drawn[f"train/{label}/{number}.png"] = pixels(4, 4, *channels)
    if test:
        drawn |= {f"test/{label}/0.png": pixels(4, 4, *channels) for label in ("dog", "cat")}
    for path, image in drawn.items():
        part, label, file = path.split("/")
        draw(folder, part, label, file, image)
    return drawn


@pytest.mark.parametrize("channels", [(), (3,)])
def test_folder_of_images(tmp_path: Path, channels: tuple[int, ...]) -> None:
    drawn = pets(tmp_path, *channels)
    data = load_dataset("folder:pets", tmp_path)
    assert (data.info.classes, data.info.channels, data.info.image_size) == (3, 3 if channels else 1, 4)
    assert data.split["images"] == {"train": 27, "validation": 3, "test": 2}
    assert own_info("folder:pets", tmp_path) == data.info
    assert data.test.labels.tolist() == [1, 2]  # ant, cat, dog: a class may be missing among the test images
    expected = np.stack([drawn["test/cat/0.png"], drawn["test/dog/0.png"]])
    assert np.array_equal(data.test.images.permute(0, 2, 3, 1).squeeze(-1).numpy(), expected)
    assert sorted(data.train.labels.bincount().tolist()) == [9, 9, 9]


def test_mixed_colours_are_rgb(tmp_path: Path) -> None:
    pets(tmp_path)
    image = pixels(4, 4, 3)
    draw(tmp_path, "test", "cat", "0.png", image)
    data = load_dataset("folder:pets", tmp_path)
    assert data.info.channels == 3
    assert np.array_equal(data.test.images[0].permute(1, 2, 0).numpy(), image)
    assert (data.test.images[1] == data.test.images[1, :1]).all()


def test_folder_without_a_test_part_is_split(tmp_path: Path) -> None:
    pets(tmp_path, test=False)
    data = load_dataset("folder:pets", tmp_path)
    assert data.split["images"] == {"train": 21, "validation": 3, "test": 6}
    assert own_info("folder:pets", tmp_path) == data.info


def test_a_large_folder_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One colour makes all images RGB; that all are grey is known once all were seen."""
    pets(tmp_path, 3)
    monkeypatch.setattr(pictures, "_MOST_FILES", 5)
    found = own_info("folder:pets", tmp_path)
    assert found is not None
    assert (found.classes, found.channels, found.image_size, found.parts) == (3, 3, 4, None)
    pets(tmp_path)
    assert own_info("folder:pets", tmp_path) is None


def test_wrong_images_are_named(tmp_path: Path) -> None:
    root = tmp_path / "datasets" / "pets"
    with pytest.raises(DataError, match=f"{root}/train/CLASS/IMAGE is needed"):
        load_dataset("folder:pets", tmp_path)
    pets(tmp_path)
    bad = draw(tmp_path, "train", "dog", "9.png", pixels(5, 4))
    with pytest.raises(DataError, match=rf"{bad} has size \(4, 5\), .*ant/0.png has \(4, 4\)"):
        load_dataset("folder:pets", tmp_path)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(bad)
    with pytest.raises(DataError, match=f"{bad} has pixels of kind 'I;16'"):
        load_dataset("folder:pets", tmp_path)
    content = draw(tmp_path, "train", "dog", "9.png", pixels(4, 4)).read_bytes()
    for damaged in (content[:-20], content[:50], b"", b"no image"):
        bad.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{bad} is no whole image"):
            load_dataset("folder:pets", tmp_path)
    bad.write_bytes(content)
    stray = draw(tmp_path, "test", "cow", "0.png", pixels(4, 4))
    with pytest.raises(DataError, match="has the class 'cow', which"):
        load_dataset("folder:pets", tmp_path)
    stray.unlink()
    stray.parent.rmdir()
    load_dataset("folder:pets", tmp_path)


@pytest.mark.parametrize("change", ["changed", "new", "gone"])
def test_changed_folder_is_refused(tmp_path: Path, change: str) -> None:
    pets(tmp_path)
    first = load_dataset("folder:pets", tmp_path)
    path = tmp_path / "datasets/pets/train/dog" / ("10.png" if change == "new" else "3.png")
    before = path.read_bytes() if path.exists() else None
    path.unlink() if change == "gone" else draw(tmp_path, "train", "dog", path.name, pixels(4, 4))
    said = {"changed": "has changed", "new": "is new", "gone": "is gone"}[change]
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=f"{path} {said} since the set's first use: put back what was"):
            call("folder:pets", tmp_path)
    path.unlink() if before is None else path.write_bytes(before)
    assert load_dataset("folder:pets", tmp_path).sha256 == first.sha256


def test_oblong_folder_is_refused(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        for number in range(10):
            draw(tmp_path, "train", label, f"{number}.png", pixels(4, 5))
    with pytest.raises(DataError, match="must be square"):
        load_dataset("folder:pets", tmp_path)


def test_an_image_that_links_bring_twice_is_refused(tmp_path: Path) -> None:
    """Else it may lie in training and test images."""
    pets(tmp_path)
    train = tmp_path / "datasets/pets/train"
    loop = train / "cat" / "loop"
    loop.symlink_to(train / "cat")
    with pytest.raises(DataError, match=f"{loop}/0.png is {train}/cat/0.png again, by a link"):
        load_dataset("folder:pets", tmp_path)
    loop.unlink()
    copy = tmp_path / "datasets/pets/test/cat/1.png"
    copy.symlink_to(train / "cat/1.png")
    with pytest.raises(DataError, match=f"{copy} is {train}/cat/1.png again"):
        load_dataset("folder:pets", tmp_path)
    copy.unlink()
    load_dataset("folder:pets", tmp_path)


def test_a_folder_of_one_class_is_refused(tmp_path: Path) -> None:
    for number in range(20):
        draw(tmp_path, "train", "cat", f"{number}.png", pixels(4, 4))
    for call in (load_dataset, own_info):
        with pytest.raises(DataError, match="1 classes; there must be 2"):
            call("folder:pets", tmp_path)
