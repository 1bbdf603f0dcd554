"""Each architecture against a plain build of it, from the protocols' words alone, with the same weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.examples import deep
from tests.lazily import lazily
from ttsv.errors import ConfigError
from ttsv.layers import SOC, SOCTT, MinMax, TTConv2d, tensorize
from ttsv.models import create_model
from ttsv.spectral.network import model_spectra, spectral_layers

torchvision = lazily("torchvision")

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2, 0.25, 0.3)


def network(name: str, **options: Any) -> nn.Module:
    """In float64, with batch norm's weights and statistics drawn so that each of them matters."""
    torch.manual_seed(0)
    model = create_model(name, **{"num_classes": 7, "mean": MEAN, "std": STD, **options}).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            for tensor in (module.weight.data, module.bias.data, module.running_mean):
                tensor.normal_()
            module.running_var.uniform_(0.001, 0.1)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            module.bias.data.normal_()
    return model


def images(size: int, count: int = 3) -> Tensor:
    return torch.rand(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def normalised(pixels: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return (pixels - mean[:, None, None]) / std[:, None, None]


class Weights:
    """The model's tensors, one kind at a time, in the order of the forward pass."""

    def __init__(self, model: nn.Module, training: bool = False) -> None:
        self.training = training
        self.convolutions = iter(spectral_layers(model).values())
        self.norms = (m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        self.linear = (m for m in model.modules() if isinstance(m, nn.Linear))

    def convolve(self, features: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
        layer = next(self.convolutions)
        assert isinstance(layer, nn.Conv2d | TTConv2d)
        kernel = layer.dense_kernel() if isinstance(layer, TTConv2d) else layer.weight
        return functional.conv2d(features, kernel, layer.bias, stride, padding)

    def normalise(self, features: Tensor, eps: float) -> Tensor:
        norm = next(self.norms)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, variance = norm.running_mean, norm.running_var
        if self.training:
            mean, variance = features.mean((0, 2, 3)), features.var((0, 2, 3), unbiased=False)
        scaled = (features - mean[:, None, None]) / (variance + eps).sqrt()[:, None, None]
        return norm.weight[:, None, None] * scaled + norm.bias[:, None, None]

    def apply(self, features: Tensor) -> Tensor:
        linear = next(self.linear)
        return features @ linear.weight.T + linear.bias

    def all_used(self) -> bool:
        rest: list[Iterator[nn.Module]] = [self.convolutions, self.norms, self.linear]
        return all(next(iterator, None) is None for iterator in rest)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"layer": "tt", "rank": 20}], ids=str)
@pytest.mark.parametrize(("name", "blocks", "size"), [("wrn16-2", 2, 8), ("wrn10-1", 1, 12), ("wrn22-1", 3, 32)])
def test_wide_resnet(name: str, blocks: int, size: int, options: dict[str, Any], training: bool) -> None:
    model = network(name, image_size=size, **options).train(training)
    weights = Weights(model, training)
    features = weights.convolve(normalised(images(size)))
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            shortcut = features
            if stride == 2:
                n = features.shape[-1] // 2
                shortcut = features.reshape(*features.shape[:2], n, 2, n, 2).mean((3, 5))
            inner = weights.convolve(weights.normalise(features, 1e-5).relu(), stride)
            inner = weights.convolve(weights.normalise(inner, 1e-5).relu())
            missing = inner.shape[1] - shortcut.shape[1]
            sides = [torch.zeros_like(inner[:, :count]) for count in (missing // 2, missing - missing // 2)]
            features = inner + torch.cat([sides[0], shortcut, sides[1]], dim=1)
    features = weights.normalise(features, 1e-5).relu()
    torch.testing.assert_close(model(images(size)), weights.apply(features.mean((2, 3))))
    assert weights.all_used()


@pytest.mark.parametrize("options", [{}, {"layer": "tt", "rank": 40}], ids=str)
@pytest.mark.parametrize(
    ("name", "widths", "size"),
    [
        ("vgg11", [[64], [128], [256] * 2, [512] * 2, [512] * 2], 32),
        ("vgg19", [[64] * 2, [128] * 2, [256] * 4, [512] * 4, [512] * 4], 35),
        ("vgg11", [[64], [128], [256] * 2, [512] * 2, [512] * 2], 64),
    ],
)
def test_vgg(name: str, widths: list[list[int]], size: int, options: dict[str, Any]) -> None:
    model = network(name, image_size=size, **options).eval()
    weights = Weights(model)
    features = normalised(images(size, 2))
    for stage in widths:
        for width in stage:
            features = weights.convolve(features)
            assert features.shape[1] == width
            features = weights.normalise(features, 1e-3).relu()
        features = functional.max_pool2d(features, 2)
    features = features.flatten(1)
    for width in (512, 512):
        features = weights.apply(features).relu()
        assert features.shape[1] == width
    torch.testing.assert_close(model(images(size, 2)), weights.apply(features))
    assert weights.all_used()


def test_vgg_starts_with_xavier_weights_and_no_bias() -> None:
    torch.manual_seed(0)
    model = create_model("vgg13", num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            assert not module.bias.any()
            taps = 9 if isinstance(module, nn.Conv2d) else 1
            bound = (6 / (taps * (module.weight.shape[0] + module.weight.shape[1]))) ** 0.5
            assert 0.9 * bound < module.weight.abs().max() <= bound * (1 + 1e-6)


def test_wide_resnet_starts_with_he_weights() -> None:
    torch.manual_seed(0)
    for layer in spectral_layers(create_model("wrn16-4", num_classes=10)).values():
        assert isinstance(layer, nn.Conv2d)
        assert layer.weight.std().item() == pytest.approx((2 / (9 * layer.out_channels)) ** 0.5, rel=0.15)


@pytest.mark.parametrize("name", ["wrn16-2", "vgg11", "resnet18"])
def test_tt_layers_start_with_orthonormal_factors(name: str) -> None:
    """Frames, and the core's unfolding (r1, r2 k k); undecomposed layers as cores without frames."""
    torch.manual_seed(0)
    decomposed = 0
    for layer in spectral_layers(create_model(name, num_classes=10, layer="tt", rank=40)).values():
        assert isinstance(layer, nn.Conv2d | TTConv2d)
        core = layer.core if isinstance(layer, TTConv2d) else layer.weight
        unfolding = core.transpose(0, 1).flatten(1)
        values = torch.linalg.svdvals(unfolding.detach().double())
        torch.testing.assert_close(values, torch.ones_like(values), atol=1e-5, rtol=0)
        decomposed += isinstance(layer, TTConv2d)
    assert decomposed > 3


def soc(layer: nn.Module, features: Tensor, stride: int, correction: float, terms: int) -> Tensor:
    """The exponential of a skew convolution, from its definition."""
    assert isinstance(layer, SOC | SOCTT)
    core = layer.core if isinstance(layer, SOCTT) else layer
    if isinstance(layer, SOCTT):
        features = torch.einsum("ncij,ca->naij", features, layer.k1)
    out = layer.rank[1] if isinstance(layer, SOCTT) else layer.out_channels
    if stride == 2:
        pixels = [features[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        features = torch.stack(pixels, dim=2).flatten(1, 2)
    assert core.correction == correction
    kernel, channels = core.scaled_kernel(), len(core.weight)
    assert channels == max(features.shape[1], out)
    zeros = features.new_zeros(len(features), channels - features.shape[1], *features.shape[2:])
    term = total = torch.cat([features, zeros], dim=1)
    for power in range(1, terms + 1):
        term = functional.conv2d(term, kernel, padding=kernel.shape[-1] // 2) / power
        total = total + term
    total = total[:, :out]
    if isinstance(layer, SOCTT):
        total = torch.einsum("naij,ac->ncij", total, layer.k3)
    assert layer.bias is not None
    return total + layer.bias[:, None, None]


@pytest.mark.parametrize(
    ("kind", "rank"),
    # At rank 600 no layer has frames; they are scaled as cores are all the same.
    [("soc", None), ("soc-tt", 6), ("soc-tt", 600), ("dense", None), ("tt", 6)],
)
@pytest.mark.parametrize(("depth", "size"), [(5, 32), (15, 32), (5, 64)])
def test_lipconvnet(depth: int, size: int, kind: str, rank: int | None) -> None:
    model = network(f"lipconvnet-{depth}", image_size=size, layer=kind, rank=rank, width=4).eval()
    weights = Weights(model)
    features = normalised(images(size))

    def convolve(features: Tensor, kernel_size: int, stride: int) -> Tensor:
        if "soc" not in kind:
            return weights.convolve(features, stride, kernel_size // 2)
        correction = 1.0 if kernel_size == 1 and kind == "soc" else 0.7
        layer = next(weights.convolutions)
        assert (layer.core if isinstance(layer, SOCTT) else layer).kernel_size == kernel_size
        return soc(layer, features, stride, correction, terms=12)

    for stage in range(5):
        for block in range(depth // 5):
            last = block == depth // 5 - 1
            features = convolve(features, 1 if last and stage == 4 else 3, 2 if last else 1)
            assert features.shape[1] == 4 * 2**stage * (2 if last else 1)
            low, high = features[:, : features.shape[1] // 2], features[:, features.shape[1] // 2 :]
            features = torch.cat([torch.minimum(low, high), torch.maximum(low, high)], dim=1)
    assert features.shape[2:] == (size // 32, size // 32)
    features = features.flatten(1)[:, :, None, None]
    logits = convolve(features, 1, 1).flatten(1)
    torch.testing.assert_close(model(images(size)), logits)
    assert weights.all_used()


@pytest.mark.slow
def test_lipconvnet_is_as_lipschitz_as_its_layers_say() -> None:
    """In pixels: the product of the layers' rigorous bounds over the smallest std."""
    for kind, frames in (("soc", "free"), ("soc-tt", "orthonormal"), ("soc-tt", "free")):
        model = network("lipconvnet-5", layer=kind, rank=6, frames=frames, width=4).eval()
        spectra = model_spectra(model, 32)
        layers = spectral_layers(model)
        assert list(spectra) == list(layers)
        bound, sizes = 1 / min(STD), (32, 16, 8, 4, 2, 1)
        for layer, size in zip(layers.values(), sizes, strict=True):
            assert isinstance(layer, SOC | SOCTT)
            bound *= layer.lipschitz_bound(size)
        assert all(values.max() <= 1 + 1e-5 for values in spectra.values())
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for scale in (1.0, 1e-3):
                first = torch.rand(50, 3, 32, 32, dtype=torch.float64, generator=generator)
                change = scale * torch.randn(first.shape, dtype=torch.float64, generator=generator)
                lengths = torch.linalg.vector_norm(change.flatten(1), dim=1)
                ratios = torch.linalg.vector_norm(model(first + change) - model(first), dim=1) / lengths
                assert 0 < ratios.max() <= bound
        if kind == "soc" or frames == "orthonormal":
            assert bound < (1 + 1e-6) / min(STD)


def test_min_max_sorts_pairs_and_keeps_the_norm() -> None:
    features = torch.randn(5, 6, 4, dtype=torch.float64)
    result = MinMax()(features)
    pairs = torch.stack([features[:, :3], features[:, 3:]])
    torch.testing.assert_close(torch.stack([result[:, :3], result[:, 3:]]), pairs.sort(dim=0).values)
    torch.testing.assert_close(result.norm(), features.norm())
    with pytest.raises(ValueError, match="5 is odd"):
        MinMax()(features[:, :5])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("resnet18", 64), deep("resnet34", 64), ("resnet18", 32)])
def test_resnets_are_torchvisions(name: str, size: int) -> None:
    """With the stem for CIFAR below 64 pixels: 3x3, stride 1, no pooling."""
    model = network(name, image_size=size).eval()
    theirs = torchvision.models.get_model(name, weights=None, num_classes=7)
    if size < 64:
        theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        theirs.maxpool = nn.Identity()
    state = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("normalize")}
    theirs.double().eval().load_state_dict(state)
    pixels = images(size, 2)
    torch.testing.assert_close(model(pixels), theirs(normalised(pixels)))


class TestTorchvision:
    NAME = "torchvision:mobilenet_v3_small"

    def test_dense_is_torchvisions_behind_the_normalisation(self) -> None:
        torch.manual_seed(0)
        theirs = torchvision.models.mobilenet_v3_small(num_classes=7).double().eval()
        model = network(self.NAME).double().eval()
        model.get_submodule("network").load_state_dict(theirs.state_dict())
        torch.testing.assert_close(model(images(32)), theirs(normalised(images(32))))

    def test_decomposed_is_the_tensorized_network(self) -> None:
        torch.manual_seed(0)
        dense = create_model(self.NAME, num_classes=7).eval()
        torch.manual_seed(0)
        model = create_model(self.NAME, num_classes=7, layer="tt", rank=0.5, frames="orthonormal").eval()
        layers = spectral_layers(model)
        decomposed = [name for name, layer in layers.items() if isinstance(layer, TTConv2d)]
        assert 5 < len(decomposed) < len(layers)
        assert all(layers[name].frames == "orthonormal" for name in decomposed)
        grouped = [layer for layer in layers.values() if isinstance(layer, nn.Conv2d) and layer.groups > 1]
        assert len(grouped) == 11
        pixels = images(32).float()
        assert torch.equal(model(pixels), tensorize(dense, 0.5, frames="orthonormal")(pixels))

    @pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet", "squeezenet1_1"])
    def test_other_channels_and_a_single_output(self, name: str) -> None:
        model = create_model(f"torchvision:{name}", num_classes=7, in_channels=1, image_size=48).train()
        assert model(torch.rand(2, 1, 48, 48)).shape == (2, 7)

    def test_sizes_that_cannot_be(self) -> None:
        with pytest.raises(ConfigError, match="image_size = 48: is not a size that torchvision's inception_v3 takes"):
            create_model("torchvision:inception_v3", num_classes=7, image_size=48)
