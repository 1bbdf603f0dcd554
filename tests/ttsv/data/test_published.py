import functools
import gzip
import hashlib
import http.server
import importlib
import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.lazily import lazily
from ttsv.data import DATASETS, fetch_dataset, load_dataset, verify_dataset
from ttsv.data.content import content_sha256
from ttsv.data.source import Arrays
from ttsv.errors import DataError

datasets = lazily("torchvision.datasets")

matlab: Any = importlib.import_module("scipy.io")  # has no types
PER_FILE = 60
TRAIN, TEST = 3 * PER_FILE, PER_FILE


# --- small sets in the publishers' formats, whose checksums torchvision is made to state ---


def batch_pickle(images: NDArray[np.uint8], label_key: str, labels: list[int]) -> bytes:
    """A batch as the authors' Python 2 and NumPy wrote it: byte strings and an old dtype, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    pixels = images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + number(len(images)) + number(3072) + b"\x86"
    array += b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    array += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array += b"\x89" + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    label_list = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(label_key.encode()) + label_list + b"u."


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Published:
    """The files of one set as they would be downloaded (by path below `datasets`), and what they hold."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        random = np.random.default_rng(7)
        info = DATASETS[name]
        count = 5 * PER_FILE + TEST if name == "cifar10" else TRAIN + TEST
        self.train = count - TEST
        shape = (count, info.channels, info.image_size, info.image_size)
        self.images = random.integers(0, 256, shape, dtype=np.uint8)
        self.labels = (np.arange(count) * 7) % info.classes
        self.files: dict[str, bytes] = {}

    @property
    def datasets(self) -> Path:
        return self.folder / "datasets"

    def put(self, **damaged: bytes) -> None:
        """Writes every downloaded file, some damaged."""
        for file, content in {**self.files, **damaged}.items():
            path = self.datasets / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def parts(self) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        return [(self.images[s], self.labels[s]) for s in (slice(self.train), slice(self.train, None))]


def cifar(name: str, published: Published, patch: pytest.MonkeyPatch, url: str) -> None:
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    entries: dict[str, bytes] = {}
    names = [file for file, _ in dataset.train_list + dataset.test_list]
    bounds = np.cumsum([0, *[published.train // (len(names) - 1)] * (len(names) - 1), TEST])
    for index, file in enumerate(names):
        chosen = slice(bounds[index], bounds[index + 1])
        key = "labels" if name == "cifar10" else "fine_labels"
        images = published.images[chosen].reshape(-1, 3072)
        entries[file] = batch_pickle(images, key, published.labels[chosen].tolist())
    meta = [f"class {index}" for index in range(DATASETS[name].classes)]
    entries[dataset.meta["filename"]] = pickle.dumps({dataset.meta["key"]: meta}, protocol=2)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file, content in entries.items():
            entry = tarfile.TarInfo(f"{dataset.base_folder}/{file}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    published.files[dataset.filename] = buffer.getvalue()
    for attribute in ("train_list", "test_list"):
        patch.setattr(dataset, attribute, [[file, md5(entries[file])] for file, _ in getattr(dataset, attribute)])
    patch.setattr(dataset, "meta", {**dataset.meta, "md5": md5(entries[dataset.meta["filename"]])})
    patch.setattr(dataset, "tgz_md5", md5(buffer.getvalue()))
    patch.setattr(dataset, "url", f"{url}/{dataset.filename}")


def svhn(published: Published, patch: pytest.MonkeyPatch, url: str) -> None:
    stated = dict(datasets.SVHN.split_list)
    for split, (images, labels) in zip(("train", "test"), published.parts(), strict=True):
        _, file, _ = stated[split]
        buffer = io.BytesIO()
        digits = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        matlab.savemat(buffer, {"X": images.transpose(2, 3, 1, 0), "y": digits}, do_compression=True)
        published.files[file] = buffer.getvalue()
        stated[split] = [f"{url}/{file}", file, md5(buffer.getvalue())]
    patch.setattr(datasets.SVHN, "split_list", stated)


def fashion_mnist(published: Published, patch: pytest.MonkeyPatch, url: str) -> None:
    contents = []
    for images, labels in published.parts():
        contents.append(struct.pack(">4I", 0x803, len(images), 28, 28) + images.tobytes())
        contents.append(struct.pack(">2I", 0x801, len(labels)) + labels.astype(np.uint8).tobytes())
    resources = []
    for (file, _), content in zip(datasets.FashionMNIST.resources, contents, strict=True):
        packed = gzip.compress(content)
        published.files[f"FashionMNIST/raw/{file}"] = packed
        resources.append((file, md5(packed)))
    patch.setattr(datasets.FashionMNIST, "resources", resources)
    patch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/", f"{url}/"])


BUILDERS: dict[str, Callable[[Published, pytest.MonkeyPatch, str], None]] = {
    "cifar10": functools.partial(cifar, "cifar10"),
    "cifar100": functools.partial(cifar, "cifar100"),
    "svhn": svhn,
    "fashion-mnist": fashion_mnist,
}


class Server(http.server.ThreadingHTTPServer):
    """Gives files by their name, that named `cut` with 5 bytes less than it says. Without files nothing is found."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut = ""
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        content = self.server.files.get(name)
        self.server.asked.append(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:-5] if name == self.server.cut else content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(params=list(BUILDERS))
def published(
    request: pytest.FixtureRequest, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Published:
    made = Published(request.param, tmp_path)
    BUILDERS[made.name](made, monkeypatch, server.url)
    return made


def refuse_to_parse(patch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("parsed before the checksum was checked")

    patch.setattr(pickle, "load", parsed)
    patch.setattr(tarfile, "open", parsed)
    patch.setattr(gzip, "open", parsed)
    patch.setattr(matlab, "loadmat", parsed)


def require_whole(published: Published) -> None:
    data = load_dataset(published.name, published.folder)
    assert data.split["images"]["test"] == TEST
    assert data.split["test"] == "published"
    assert data.test.images.dtype == torch.uint8
    assert np.array_equal(data.test.images.numpy(), published.images[-TEST:])
    assert data.test.labels.tolist() == published.labels[-TEST:].tolist()
    # Training and validation images are the publisher's training images, each once.
    found = torch.cat([data.train.images, data.validation.images]).flatten(1).numpy()
    labels = torch.cat([data.train.labels, data.validation.labels]).tolist()
    given = published.images[: published.train].reshape(published.train, -1)
    assert sorted(zip(map(bytes, found), labels, strict=True)) == sorted(
        zip(map(bytes, given), published.labels[: published.train].tolist(), strict=True)
    )
    expected = content_sha256(Arrays(published.images, published.labels.astype(np.int64), published.train))
    assert verify_dataset(published.name, published.folder) == data.sha256 == expected


def test_files_put_there_are_taken_without_a_network(published: Published, server: Server) -> None:
    published.put()
    fetch_dataset(published.name, published.folder)
    assert server.asked == []
    require_whole(published)


def test_files_are_downloaded(published: Published, server: Server) -> None:
    server.files = {Path(file).name: content for file, content in published.files.items()}
    steps: list[tuple[str, int, int | None]] = []
    fetch_dataset(published.name, published.folder, lambda *step: steps.append(step))
    require_whole(published)
    assert {file: done for file, done, _ in steps} == {name: len(server.files[name]) for name in server.files}
    assert all(total == len(server.files[file]) for file, _, total in steps)
    asked = len(server.asked)
    fetch_dataset(published.name, published.folder)
    assert len(server.asked) == asked == len(server.files)


@pytest.fixture(params=["cifar10", "cifar100"])
def archived(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """CIFAR, downloaded."""
    made = Published(request.param, tmp_path)
    BUILDERS[made.name](made, monkeypatch, "http://127.0.0.1:9")
    made.put()
    return made


def test_of_an_archive_that_lacks_a_file_nothing_is_taken(archived: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[archived.name]
    archive, lost = archived.datasets / dataset.filename, dataset.test_list[0][0]
    with tarfile.open(archive) as tar:
        opened = [(entry, tar.extractfile(entry)) for entry in tar if not entry.name.endswith(lost)]
        kept = [(entry, file.read()) for entry, file in opened if file]
    with tarfile.open(archive, "w:gz") as tar:
        for entry, content in kept:
            tar.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(dataset, "tgz_md5", md5(archive.read_bytes()))
    with pytest.raises(DataError, match=f"cannot be unpacked: not as published in it: {lost}"):
        fetch_dataset(archived.name, archived.folder)
    assert not (archived.datasets / dataset.base_folder).exists()


@pytest.mark.parametrize("what", ["labels", "types"])
def test_contents_that_no_checksum_tells(archived: Published, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[archived.name]
    read = dataset.__init__

    def reading(self: Any, *args: Any, train: bool, **kwargs: Any) -> None:
        read(self, *args, train=train, **kwargs)
        if what == "types":
            self.data = self.data.astype(np.float32)
        else:  # as many as images over both parts
            self.targets = [*self.targets, 0] if train else self.targets[:-1]

    monkeypatch.setattr(dataset, "__init__", reading)
    with pytest.raises(DataError, match="does not hold what its publisher describes"):
        fetch_dataset(archived.name, archived.folder)


@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
def test_a_bad_download_leaves_nothing(published: Published, server: Server, damage: str) -> None:
    server.files = {Path(file).name: content for file, content in published.files.items()}
    last = list(server.files)[-1]
    if damage == "altered":
        server.files[last] = altered(server.files[last])
    elif damage == "missing":
        del server.files[last]
    server.cut = last if damage == "cut" else ""
    with pytest.raises(DataError, match=rf"{last} failed: .*run `ttsv data fetch {published.name}` with a network"):
        fetch_dataset(published.name, published.folder)
    left = {path.name for path in published.datasets.rglob("*") if path.is_file()}
    assert left <= {*(Path(file).name for file in published.files), f"{published.name}.lock"}
    assert last not in left
    with pytest.raises(DataError, match=f"`ttsv data fetch {published.name}`"):
        load_dataset(published.name, published.folder)
    server.files, server.cut = {Path(file).name: content for file, content in published.files.items()}, ""
    fetch_dataset(published.name, published.folder)
    require_whole(published)


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_damaged_file_is_named_before_it_is_parsed(
    published: Published, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, content in published.files.items():
        published.put(**{file: content[:-20] if damage == "cut" else altered(content)})
        path = published.datasets / file
        with monkeypatch.context() as patch:
            refuse_to_parse(patch)
            for call in (load_dataset, verify_dataset):
                with pytest.raises(DataError, match=rf"{path} is cut or altered.*`ttsv data fetch {published.name}`"):
                    call(published.name, published.folder)
            with pytest.raises(DataError, match=rf"to {path} failed.*put the whole file"):
                fetch_dataset(published.name, published.folder)
        published.put()
    fetch_dataset(published.name, published.folder)
    require_whole(published)


def test_missing_set_names_the_command(published: Published) -> None:
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=f"not in .*: run `ttsv data fetch {published.name}`"):
            call(published.name, published.folder)
        assert not list(published.folder.iterdir())
    published.datasets.mkdir()
    with pytest.raises(DataError, match=f"not in .*: run `ttsv data fetch {published.name}`"):
        load_dataset(published.name, published.folder)


@pytest.mark.parametrize("name", ["svhn", "fashion-mnist"])
def test_one_missing_file_is_named(name: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published(name, tmp_path)
    BUILDERS[name](published, monkeypatch, server.url)
    published.put()
    path = published.datasets / list(published.files)[-1]
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing: run `ttsv data fetch {name}`"):
        load_dataset(name, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01", struct.pack(">2I", 0x801, 4) + b"123"])
def test_published_file_of_another_kind_is_refused(
    content: bytes, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published("fashion-mnist", tmp_path)
    fashion_mnist(published, monkeypatch, server.url)
    file = next(iter(published.files))
    packed = gzip.compress(content)
    published.put(**{file: packed})
    resources = datasets.FashionMNIST.resources
    monkeypatch.setattr(datasets.FashionMNIST, "resources", [(resources[0][0], md5(packed)), *resources[1:]])
    with pytest.raises(DataError, match=f"{published.datasets / file} cannot be read"):
        load_dataset("fashion-mnist", tmp_path)


# --- what is particular to CIFAR: an archive that is unpacked ---


@pytest.fixture(params=["cifar10", "cifar100"])
def unpacked(
    request: pytest.FixtureRequest, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Published:
    made = Published(request.param, tmp_path)
    BUILDERS[made.name](made, monkeypatch, server.url)
    made.put()
    return made


def pack(published: Published, patch: pytest.MonkeyPatch, *entries: tarfile.TarInfo) -> None:
    """Puts another archive there, whose checksum torchvision states."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    put_archive(published, patch, buffer.getvalue())


def put_archive(published: Published, patch: pytest.MonkeyPatch, content: bytes) -> None:
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[published.name]
    patch.setattr(dataset, "tgz_md5", md5(content))
    published.put(**{dataset.filename: content})


@pytest.mark.parametrize("kind", ["outside", "absolute link", "no archive", "no tar", "cut", "other files"])
def test_an_archive_that_cannot_be_unpacked_is_named(
    kind: str, unpacked: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole = next(iter(unpacked.files.items()))
    outside, link = tarfile.TarInfo("../outside"), tarfile.TarInfo("link")
    outside.size = 4
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    match kind:
        case "outside":
            pack(unpacked, monkeypatch, outside)
        case "absolute link":
            pack(unpacked, monkeypatch, link)
        case "other files":
            pack(unpacked, monkeypatch, tarfile.TarInfo("file"))
        case _:
            damaged = {"no archive": b"none", "no tar": gzip.compress(b"none" * 999), "cut": whole[: len(whole) // 2]}
            put_archive(unpacked, monkeypatch, damaged[kind])
    with pytest.raises(DataError, match=f"{unpacked.datasets / file} cannot be unpacked"):
        fetch_dataset(unpacked.name, unpacked.folder)
    assert not (unpacked.folder / "outside").exists()
    assert [path.name for path in unpacked.datasets.iterdir() if path.name not in ("cache", file)] in (
        [],
        [unpacked_folder(unpacked)],
    )


def unpacked_folder(published: Published) -> str:
    return {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[published.name]


@pytest.mark.parametrize(
    "content",
    [{b"data": 0}, [], {"data": np.zeros((60, 7), np.uint8), "labels": [0] * 60, "fine_labels": [0] * 60}],
)
def test_a_published_batch_that_holds_something_else_is_named(
    content: Any, unpacked: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_dataset(unpacked.name, unpacked.folder)
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[unpacked.name]
    batch = pickle.dumps(content, protocol=2)
    first, *others = dataset.train_list
    (unpacked.datasets / dataset.base_folder / first[0]).write_bytes(batch)
    monkeypatch.setattr(dataset, "train_list", [[first[0], md5(batch)], *others])
    (unpacked.datasets / f"{unpacked.name}.sha256.json").unlink(missing_ok=True)
    with pytest.raises(DataError, match=f"{unpacked.datasets / dataset.base_folder} does not hold what its publisher"):
        load_dataset(unpacked.name, unpacked.folder)


def test_a_damaged_archive_is_said_where_no_other_comes(unpacked: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    file, whole = next(iter(unpacked.files.items()))
    unpacked.put(**{file: whole[:-9]})
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[unpacked.name]
    monkeypatch.setattr(dataset, "url", "http://127.0.0.1:9/none")
    with pytest.raises(DataError, match=f"{unpacked.datasets / file}, which is there, is cut or altered"):
        fetch_dataset(unpacked.name, unpacked.folder)


def test_archive_is_not_read_before_it_is_unpacked(unpacked: Published) -> None:
    with pytest.raises(DataError, match=f"not unpacked: run `ttsv data fetch {unpacked.name}`"):
        load_dataset(unpacked.name, unpacked.folder)
    fetch_dataset(unpacked.name, unpacked.folder)
    assert not [path for path in unpacked.datasets.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
@pytest.mark.parametrize("which", ["train", "test", "meta"])
def test_damaged_unpacked_file_is_named_and_mended(
    unpacked: Published, damage: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unpacked.name
    fetch_dataset(name, unpacked.folder)
    dataset: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    files = {"train": dataset.train_list[0][0], "test": dataset.test_list[0][0], "meta": dataset.meta["filename"]}
    file = unpacked.datasets / dataset.base_folder / files[which]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut" else content)
    with monkeypatch.context() as patch:
        refuse_to_parse(patch)
        match = f"{file} is " + ("missing" if damage == "missing" else "cut or altered")
        for call in (load_dataset, verify_dataset):
            with pytest.raises(DataError, match=match):
                call(name, unpacked.folder)
    fetch_dataset(name, unpacked.folder)
    require_whole(unpacked)
