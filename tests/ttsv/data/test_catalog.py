import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttsv.data import DATASETS, check_name, dataset_info
from ttsv.data.catalog import MAX_CLASSES, MAX_SYNTHETIC_BYTES, DatasetName, own_set, synthetic_shape
from ttsv.errors import ConfigError

GOOD = [
    *DATASETS,
    "synthetic:3x32x32:10:2000",
    "synthetic:1x9:2:20",
    "synthetic:2x8x8x8:3:30",
    "npz:mine",
    "npz:A.b_c-9",
    "npz:a..b",
    "folder:0",
    f"folder:{'x' * 50}",
]
BAD: list[Any] = [
    "",
    "mnist",
    "CIFAR10",
    "cifar10 ",
    "cifar10\n",
    "npz:",
    "npz:.",
    "npz:..",
    "npz:.hidden",
    "npz:a/b",
    "npz:../../etc/passwd",
    "npz:a\\b",
    "npz:/etc/passwd",
    "npz:a\n",
    "npz:a\0",
    "npz:é",
    f"npz:{'x' * 51}",
    "folder:..",
    "folder:a b",
    "file:a",
    "synthetic:",
    "synthetic:3:10:2000",
    "synthetic:3x32x32x32x32:10:2000",
    "synthetic:3x32x32:10",
    "synthetic:03x32x32:10:2000",
    "synthetic:3x32x32:10:-1",
    "synthetic:3x32x32:10:2000\n",
    "synthetic:3x32x32:10:٢٠٠",
    None,
    3,
    ["digits"],
]
REFUSED = {
    "synthetic:3x32x31:10:2000": "must have the same SIZE along every axis",
    "synthetic:3x32x32:1:2000": f"2 to {MAX_CLASSES} classes",
    "synthetic:1x1x1:10001:999999": f"2 to {MAX_CLASSES} classes",
    "synthetic:3x32x32:10:99": "at least 10 images per class, 100",
    "synthetic:3x999999x999999:10:100": f"at most {MAX_SYNTHETIC_BYTES} values",
    "synthetic:1x1024x1024:2:1025": "not 1074790400",
}


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    check_name(name)
    assert DatasetName().fix(name) is None
    info = dataset_info(name)
    assert (info is None) == (own_set(name) is not None)
    assert info is None or info.name == name


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_told_the_choices(name: Any) -> None:
    for call in (check_name, dataset_info):
        with pytest.raises(ConfigError) as caught:
            call(name)
        assert (caught.value.field, caught.value.value) == ("dataset", name)
        for choice in (*DATASETS, "synthetic:3x32x32:10:2000", "npz:NAME", "folder:NAME"):
            assert choice in caught.value.fix


@pytest.mark.parametrize(("name", "fix"), REFUSED.items())
def test_impossible_synthetic_sets_are_told_why(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        check_name(name)


def test_schema_takes_what_the_check_takes() -> None:
    schema = DatasetName().schema()
    json.dumps(schema)
    enum, *patterns = schema["anyOf"]

    def taken(name: Any) -> bool:
        # JSON schema's patterns: a string, searched in; `$` in them is the very end.
        found = (re.search(part["pattern"].replace("$", r"\Z"), name) for part in patterns)
        return isinstance(name, str) and (name in enum["enum"] or any(found))

    assert all(map(taken, [*GOOD, *REFUSED]))
    assert not any(map(taken, BAD))


@given(
    channels=st.integers(1, 9),
    size=st.integers(1, 64),
    dims=st.integers(1, 3),
    classes=st.integers(2, 50),
    images=st.integers(500, 3000),
)
def test_synthetic_names_say_what_they_make(channels: int, size: int, dims: int, classes: int, images: int) -> None:
    name = f"synthetic:{'x'.join(map(str, [channels, *[size] * dims]))}:{classes}:{images}"
    info, shape = dataset_info(name) if not DatasetName().fix(name) else None, synthetic_shape(name)
    assert shape is not None
    assert (shape.channels, shape.size, shape.dims, shape.classes, shape.images) == (
        channels,
        size,
        dims,
        classes,
        images,
    )
    if images * channels * size**dims <= MAX_SYNTHETIC_BYTES:
        assert info is not None
        assert (info.channels, info.image_size, info.dims, info.classes) == (channels, size, dims, classes)
        assert len(info.mean) == len(info.std) == channels
    else:
        assert info is None


def test_the_catalogue_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, ttsv.data.catalog; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
