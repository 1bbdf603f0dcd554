"""What outsiders import, from the packages themselves, and the numbers that they may rely on."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttsv.certification import certified_accuracy, lipschitz_bound
from ttsv.constraints import Clip
from ttsv.layers import TTConv2d, densify, tensorize
from ttsv.metrics import compression, expected_calibration_error
from ttsv.models import create_model, layer_shapes, list_models
from ttsv.spectral import (
    clip_conv,
    clip_matrix,
    clip_tt,
    conv_norm,
    conv_norm_bounds,
    conv_singular_values,
    divide_conv,
    model_spectra,
    tt_singular_values,
)
from ttsv.tt import tt_svd, tt_to_dense

DOORS = {
    "ttsv.spectral": (
        "NormBounds clip_conv clip_matrix clip_tt conv_norm_bounds conv_singular_values divide_conv model_spectra"
        " tt_singular_values"
    ),
    "ttsv.tt": "orthogonalize tt_error tt_ranks tt_svd tt_to_dense",
    "ttsv.layers": "TTConv1d TTConv2d TTConv3d SOC SOCTT densify tensorize orthogonal_loss",
    "ttsv.constraints": "Clip Compose Constraint Divide Orthogonal Unconstrained",
    "ttsv.models": "create_model layer_shapes list_models",
    "ttsv.metrics": "autoattack compression corruption_accuracy empirical_lipschitz expected_calibration_error",
    "ttsv.metrics.cost": "compression",
    "ttsv.certification": "certified_accuracy lipschitz_bound",
    "ttsv.evaluation": "evaluate load_saved measure",
    "ttsv.data": "list_datasets load_dataset",
}
"""Package -> what it must give; it may give more."""


def S(*shape: int) -> Tensor:
    """The example kernel of a shape."""
    return torch.sin(torch.arange(1, prod(shape) + 1, dtype=torch.float64)).reshape(shape)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_gives_what_it_lists(door: str) -> None:
    package = import_module(door)
    if door != "ttsv.metrics.cost":  # a module
        assert set(DOORS[door].split()) <= set(package.__all__)
        assert len(package.__all__) == len(set(package.__all__))
    for name in DOORS[door].split():
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


def first_paragraph(found: Any) -> str:
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    return " ".join((text or "").split("\n\n")[0].split())


def public(door: str) -> Iterator[tuple[str, Any]]:
    """Each name that a door gives, and the public methods of its classes, those of their bases here included."""
    package = import_module(door)
    for name in getattr(package, "__all__", DOORS[door].split()):
        found = getattr(package, name)
        yield f"{door}.{name}", found
        for kind in found.__mro__ if inspect.isclass(found) else ():
            for method, value in vars(kind).items() if kind.__module__.startswith("ttsv") else ():
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{door}.{name}.{method}", function


NO_VERBS = {"Arguments", "As", "Bounds", "Channels", "Images", "Its", "Norms", "Radius", "Shares", "This", "Values"}
"""Words that would pass for a verb in the third person, and begin fragments."""


@pytest.mark.parametrize("door", DOORS)
def test_each_name_says_in_a_sentence_what_it_is(door: str) -> None:
    """Functions and methods say it by a verb: `Returns`, not the name of what they return."""
    wrong = []
    for name, found in public(door):
        if not (inspect.isclass(found) or inspect.isroutine(found)):
            continue  # an alias of types says nothing of its own
        said = first_paragraph(found)
        word = re.match(r"([A-Z][a-z-]*s)\b", said)
        acts = inspect.isclass(found) or (word is not None and word[1] not in NO_VERBS)
        if not (re.match(r"[A-Z].*[.:](\s|$)", said) and acts):
            wrong.append(f"{name}: {said}")
    assert not wrong, "\n".join(wrong)


class TestNumbers:
    """From dense operators."""

    def test_spectra(self) -> None:
        values = conv_singular_values(S(3, 2, 3, 3), (4, 6), stride=(2, 1))
        assert values.shape == (12, 3)
        assert values.max().item() == pytest.approx(8.147816, abs=1e-6)
        assert values.sum().item() == pytest.approx(59.253529, abs=1e-6)
        assert (values.diff(dim=1) <= 0).all()

    def test_kernels_larger_than_the_input_are_folded(self) -> None:
        values = conv_singular_values(S(3, 2, 3, 3), (2, 2))
        assert values.numel() == 8
        assert values.max().item() == pytest.approx(10.542015, abs=1e-6)
        assert values.min().item() == pytest.approx(0.027822, abs=1e-6)

    def test_a_stride_must_divide_its_size(self) -> None:
        with pytest.raises(ValueError, match="stride"):
            conv_singular_values(S(3, 2, 3, 3), (5, 5), stride=2)

    def test_spectra_of_tensor_trains(self) -> None:
        values = tt_singular_values(S(4, 2), S(2, 2, 3, 3), S(2, 3), (4, 4), stride=2)
        assert values.shape == (4, 2)
        assert values.max().item() == pytest.approx(4.440897, abs=1e-6)
        assert values.min().item() == pytest.approx(0.226990, abs=1e-6)

    def test_bounds_of_zero_padded_norms(self) -> None:
        row = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
        bounds = conv_norm_bounds(torch.outer(row, row)[None, None], 3)
        assert bounds.lower <= 11.656855 <= bounds.upper + 1e-6
        assert bounds.lower >= 0.99 * 11.656854
        assert bounds.upper <= 13.090170 * (1 + 1e-6)

    def test_bounds_of_periodic_norms(self) -> None:
        lower, upper = conv_norm_bounds(S(3, 2, 3, 3), (4, 4), padding_mode="circular")
        assert lower <= 10.542015 + 1e-6
        assert upper >= 10.542015 - 1e-6
        assert upper <= 1.01 * lower

    @pytest.mark.parametrize(
        ("options", "element", "frobenius", "norm"),
        [
            ({}, 0.251926, 1.261332, 2.323690),
            ({"rounds": 5, "rescale": True}, 0.191497, 0.889825, 1.5),
        ],
        ids=["once", "five rounds, rescaled"],
    )
    def test_clips(self, options: dict[str, Any], element: float, frobenius: float, norm: float) -> None:
        kernel = S(3, 2, 3, 3)
        assert conv_norm(kernel, (4, 4)) == pytest.approx(10.542015, abs=1e-6)
        clipped = clip_conv(kernel, 1.5, (4, 4), **options)
        assert clipped.shape == kernel.shape
        assert clipped.dtype == kernel.dtype
        assert clipped[0, 0, 0, 0].item() == pytest.approx(element, abs=1e-6)
        assert torch.linalg.vector_norm(clipped).item() == pytest.approx(frobenius, abs=1e-6)
        assert conv_norm(clipped, (4, 4)) == pytest.approx(norm, abs=1e-6)

    def test_clips_of_tensor_trains_and_matrices(self) -> None:
        factors = clip_tt(S(4, 2), S(2, 2, 3, 3), S(2, 3), 1.5, (4, 4), rounds=20, rescale=True)
        assert tt_singular_values(*factors, (4, 4)).max().item() <= 1.5 * (1 + 1e-9)
        assert torch.linalg.matrix_norm(clip_matrix(S(4, 3), 0.5), 2).item() == pytest.approx(0.5)

    def test_division(self) -> None:
        divided = divide_conv(S(3, 2, 3, 3), 1.0, (4, 4))
        assert conv_norm(divided, (4, 4)) <= 1 + 1e-6

    def test_decomposition(self) -> None:
        kernel = S(4, 3, 3, 3)
        assert torch.allclose(tt_to_dense(*tt_svd(kernel, (3, 4))), kernel)


class TestNetworks:
    def test_tensorized_networks(self) -> None:
        layer = TTConv2d(4, 6, 3, 2, padding=1)
        assert layer.k1.shape == (4, 2)
        assert layer.core.shape == (2, 2, 3, 3)
        assert layer.k3.shape == (2, 6)
        assert layer.dense_kernel().shape == (6, 4, 3, 3)
        dense = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1))
        compressed = tensorize(dense, 2)
        assert isinstance(dense[0], nn.Conv2d)
        assert [tuple(values.shape) for values in model_spectra(compressed, 4).values()] == [(16, 2)]
        images = torch.rand(2, 4, 5, 5)
        assert torch.allclose(densify(compressed)(images), compressed(images), atol=1e-6)

    def test_models(self) -> None:
        assert "small-cnn" in list_models()
        assert len(layer_shapes("small-cnn")) == 3
        model = create_model("small-cnn", num_classes=3, in_channels=1, image_size=8, layer="tt", rank=4)
        assert compression(model) > 1
        constraint = Clip(1.0)
        constraint.bind(model, 8, in_channels=1)
        constraint.project(model, 0, force=True)
        assert constraint.report().seconds > 0

    def test_certificates_and_calibration(self) -> None:
        linear = nn.Linear(4, 2)
        model = nn.Sequential(nn.Flatten(), linear)
        bound = float(lipschitz_bound(model, 2))
        assert torch.linalg.matrix_norm(linear.weight.double(), 2).item() <= bound
        found = certified_accuracy(model, torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64), [1e-6, 1e6])
        assert found.keys() == {1e-6, 1e6}
        assert found[1e6] == 0
        assert expected_calibration_error(torch.tensor([[9.0, 0.0]]), torch.tensor([0])) < 1e-3
