"""Records of `pullback.curvature`: influence by retraining, and posteriors beside a peer."""

from ..framework.experiment import Experiment
from .cifar import InfluenceCIFAR
from .laplace import LaplaceRegression, LaplaceRotation
from .mnist import InfluenceMNIST

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
