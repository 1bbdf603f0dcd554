"""How a network is trained, and how its images are varied: parts of a trial, torch-free."""

from dataclasses import dataclass

from ttsv.config.fields import Ascending, Checked, Number, OneOf, at_default, field

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "multistep", "onecycle")
PRECISIONS = ("float32", "bf16", "fp16")
CONVOLUTIONS = ("winograd", "direct")
LOOKING_ON = ("spectra_every", "cuda_graph")
"""Fields of the training that change no number of it: they are in no fingerprint."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """How the network is trained."""

    path = "training."

    epochs: int = field(20, "passes over the training images", Number(1, 100_000))
    steps: int | None = field(None, "optimizer steps per epoch at most; null: a whole pass", Number(1, 10_000_000))
    batch_size: int = field(64, "images per step", Number(1, 1_000_000))
    optimizer: str = field("sgd", "sgd, adam or adamw", OneOf(OPTIMIZERS))
    lr: float = field(0.05, "learning rate at the start (onecycle: at its peak)", Number(0, above=True))
    momentum: float = field(0.9, "SGD's momentum", Number(0, 1))
    nesterov: bool = field(True, "SGD: Nesterov's momentum")
    amsgrad: bool = field(False, "Adam and AdamW: AMSGrad")
    eps: float = field(1e-8, "Adam and AdamW: added to the root of the second moment", Number(0, above=True))
    weight_decay: float = field(1e-4, "L2 penalty on all weights (AdamW: decoupled)", Number(0))
    schedule: str = field(
        "cosine", "learning rate over the steps: constant, cosine (to 0), multistep, onecycle", OneOf(SCHEDULES)
    )
    milestones: tuple[int, ...] = field((), "multistep: epochs after which lr is multiplied by gamma", Ascending())
    gamma: float = field(0.1, "multistep: the factor", Number(0, 1, above=True))
    label_smoothing: float = field(0.0, "share of each label spread over all classes", Number(0, 0.999))
    clip_gradient: float | None = field(None, "largest norm of the gradient; null: unclipped", Number(0, above=True))
    ema: float | None = field(
        None, "decay per step of the averaged weights that are evaluated; null: the weights themselves", Number(0, 1)
    )
    precision: str = field(
        "float32",
        "of forward and backward passes: float32, bf16, fp16 (GPUs); constraints and evaluation: float32 or better",
        OneOf(PRECISIONS),
    )
    tf32: bool = field(
        False,
        "on a GPU that has it (Ampere and newer): products and convolutions of float32 in training steps may be in "
        "TensorFloat-32, of 10 bits; constraints, validation and evaluation never are",
    )
    deterministic: bool = field(
        False,
        "on a GPU: only algorithms that give the same bits each time, so that a resumed training is bit-equal to an "
        "unbroken one, as it always is on a CPU; slower, and not for every network",
    )
    convolutions: str = field(
        "winograd",
        "of training steps in float32 on a CPU: direct, or winograd (layers of 3x3, where it is faster; "
        "rounding errors of some 2e-6; never the series of SOC)",
        OneOf(CONVOLUTIONS),
    )
    soc_iterations: str = field(
        "one",
        "steps of the power iteration that scales kernels of SOC layers, in a training step: one (50 when a layer is "
        "made), or code (50 at the first and at every 200th step, else one: the paper's authors' programs)",
        OneOf(("one", "code")),
    )
    validation: str = field(
        "held-out",
        "what each epoch is measured on: held-out (a fixed part of the training images, not trained on), or test, "
        "the paper's authors' way: all training images are trained on, and the record says so",
        OneOf(("held-out", "test")),
    )
    select: str = field(
        "last",
        "which epoch's weights are evaluated: last, or best (on what `validation` names: with test, the authors' way)",
        OneOf(("last", "best")),
    )
    best_by: str = field(
        "accuracy",
        "by what an epoch is the best: accuracy, or certified, the share of images that an assumed Lipschitz constant "
        "of 1 would certify for a radius of 36/255 (networks of SOC layers; the paper's authors' way)",
        OneOf(("accuracy", "certified")),
    )
    keep_best: bool = field(False, "keep the best epoch's network too, beside the last one's, which is evaluated")
    recalibrate: bool = field(
        False, "take batch norm's statistics anew, over the training images, after the last projection"
    )
    final_projection: bool = field(
        True,
        "clip or divide what is evaluated once more, unless the last step has just done so; false: never, the paper's "
        "authors' way",
    )
    spectra_every: int | None = field(
        None,
        "keep quantiles of every layer's singular values after the first, the last and every so many epochs, before "
        "and after the projection; null: never. It changes no number, and no fingerprint",
        Number(1, 100_000),
    )
    cuda_graph: bool = field(
        True,
        "on a GPU: launch a step's kernels all at once, as one CUDA graph, where it can be captured (not in fp16). It "
        "changes no number, and no fingerprint; false where a network of your own does not bear it",
    )

    def canonical(self) -> "TrainingConfig":
        """The same training with every field that has no effect set to its default."""
        unused: list[str] = []
        schedule, milestones = self.schedule, self.milestones
        if schedule == "multistep":
            milestones = tuple(epoch for epoch in milestones if epoch < self.epochs)  # no step comes after the last
            schedule = "multistep" if milestones else "constant"
        if schedule != "multistep":
            milestones = ()
            unused += ["gamma"]
        if self.optimizer == "sgd":
            unused += ["amsgrad", "eps"]
        else:
            unused += ["momentum"]
        if self.optimizer != "sgd" or not self.momentum:
            unused += ["nesterov"]
        if self.precision != "float32":
            unused += ["convolutions"]
        if self.select == "best":
            unused += ["keep_best"]
        elif not self.keep_best:
            unused += ["best_by"]
        return at_default(self, unused, schedule=schedule, milestones=milestones)


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig(Checked):
    """How training images are varied, anew in every epoch."""

    path = "augmentation."

    flip: bool = field(False, "mirror each image left to right with probability 1/2")
    pad: int = field(0, "pixels added on every side before a random crop back to the size", Number(0, 1024))
    padding: str = field("zeros", "what is added: zeros or symmetric", OneOf(("zeros", "symmetric")))


TRAINING = TrainingConfig()
AUGMENTATION = AugmentationConfig()
"""The defaults."""
