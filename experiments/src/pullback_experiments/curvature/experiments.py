"""The experiments of `pullback.curvature` by name."""

from ..framework.experiment import Experiment
from .influence.cifar import InfluenceCIFAR
from .influence.mnist import InfluenceMNIST
from .influence.scale import InfluenceScale
from .influence.text import InfluenceText
from .laplace.regression import LaplaceRegression
from .laplace.rotation import LaplaceRotation

EXPERIMENTS: tuple[Experiment, ...] = (
    InfluenceMNIST(
        name="influence-mnist",
        paper="Park et al. (2023), TRAK: Attributing Model Behavior at Scale",
        figure="linear datamodeling score",
        claim="scores of training samples predict what networks trained on half of them say",
        about=(
            "An MLP 784-128-64-10 on 5,000 images; 50 halves, each with a network of a seed of its "
            "own. The damping is the weight decay of training. It was chosen on other subsets, "
            "seeds and networks."
        ),
    ),
    InfluenceCIFAR(
        name="influence-cifar",
        paper="Park et al. (2023), TRAK: Attributing Model Behavior at Scale",
        figure="linear datamodeling score",
        claim="scores of training samples predict what networks trained on half of them say",
        about=(
            "ResNet-9 on 5,000 cats and dogs; 50 halves, several networks on each. Give it a GPU: "
            "on a CPU it takes days. Training ends before every label is fitted."
        ),
    ),
    InfluenceText(
        name="influence-text",
        paper="Park et al. (2023), TRAK: Attributing Model Behavior at Scale",
        figure="linear datamodeling score",
        claim="scores of training samples predict what networks trained on half of them say",
        about=(
            "A decoder of characters on 2,000 sequences; 50 halves, four networks on each. The "
            "damping is chosen on 16 other halves. Give it a GPU."
        ),
    ),
    InfluenceScale(
        name="influence-scale",
        paper="Grosse et al. (2023), Studying Large Language Model Generalization with Influence",
        figure="seconds and memory",
        claim="influence with EK-FAC is affordable for networks of a hundred million parameters",
        about="Random weights and data; ResNet-9 and a decoder of GPT-2 small's size, on a GPU.",
    ),
    LaplaceRegression(
        name="laplace-uci",
        paper="Daxberger et al. (2021), Laplace Redux",
        figure="regression on UCI sets",
        claim="a Laplace posterior with the prior of the marginal likelihood is calibrated",
        about="One hidden layer of 50 units; the same trained network for every posterior.",
    ),
    LaplaceRotation(
        name="laplace-rotation",
        paper="Daxberger et al. (2021), Laplace Redux",
        figure="images under rotation",
        claim="a Laplace posterior is less sure of itself where the data have shifted",
        about="Fashion-MNIST; test images are turned.",
    ),
)
