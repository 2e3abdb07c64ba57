r"""Martens and Grosse (2015): does K-FAC get ahead of SGD and Adam, in steps and in time?

The paper trains the deep autoencoders of Hinton and Salakhutdinov and finds K-FAC much faster than
SGD with momentum. Here it meets Adam too, and every method has a grid of its own, searched on seeds
that do not count otherwise: rates of SGD and Adam, dampings and KL clips of K-FAC; on MNIST and
CIFAR-10 also batch sizes, and lengths of a run of which K-FAC takes the shortest that ends as low
as theirs. The steps that count are those of a plain loop; the search replays CUDA graphs.

All rates fall to zero along a line, so that a run is at its best at its end: SGD and Adam reach
their own last loss late, and K-FAC has a run of fewer steps, or at most as many, to get there.
Losses are measured in evaluation mode, without augmentation, on the training set or a fixed part of
it. Seconds count training only.

    kfac-autoencoder   MNIST, 784-1000-500-250-30-…-784, tanh, Bernoulli; --quick: digits, 64-…-64
    kfac-convnet       Fashion-MNIST of 14×14, two convolutions; --quick: digits
    kfac-vgg           CIFAR-10, VGG-16 with batch normalization, crops and flips; --quick: digits
    kfac-shakespeare   characters of tiny Shakespeare, 6 layers of width 256; --quick: made-up words

The last two have AdamW for Adam, fused steps of both, rates that rise at first, and bfloat16 on
CUDA. Who is ahead in the quick versions of the last three depends on the seed, or on round-off
where a loss is nearly 0, so that these judge nothing.

What is not the paper's: batches of one size, no increase along the run; statistics and inverses
now and then, by a schedule; factored Tikhonov damping that stays, and a KL clip instead of the
quadratic model's rescaling and momentum. (`optim.kfac` has the paper's controls too.)
"""

from __future__ import annotations

from .experiment import KFACTraining
from .methods import LARGE, QUICK_TEXT, QUICK_VGG, TEXT
from .methods import VGG as VGG_METHODS
from .tasks import AUTOENCODER, CONVNET, SHAKESPEARE, VGG

__all__ = ["EXPERIMENTS", "KFACTraining"]

_CHOICE = (
    "Each method with the best of its grid; where that has runs of several lengths, K-FAC with the "
    "shortest that ends as low as the others' best."
)

EXPERIMENTS = (
    KFACTraining(
        name="kfac-autoencoder",
        figure="deep autoencoders, in kind",
        claim="K-FAC trains a deep autoencoder in far fewer steps than SGD and Adam, and in a "
        "third of the time",
        about=f"{_CHOICE} The paper's own sizes and controls differ.",
        task=AUTOENCODER,
        methods=LARGE,
        less=3.0,
        ours=False,
    ),
    KFACTraining(
        name="kfac-convnet",
        figure="beside it, a conv net",
        claim="K-FAC trains a small convolutional network in fewer steps than SGD and Adam",
        about="Each method with the best of its grid.",
        task=CONVNET,
        epochs={"SGD": 40, "Adam": 40, "K-FAC": 20},
        quick_epochs={"SGD": 40, "Adam": 40, "K-FAC": 20},
        batch=500,
        quick_expected_outcomes=(),
    ),
    KFACTraining(
        name="kfac-vgg",
        figure="beside it, VGG-16",
        claim="K-FAC trains VGG-16 on CIFAR-10 in fewer steps and less time than SGD and AdamW",
        about=f"{_CHOICE} Losses are of 10,000 images as they are; crops and flips of all are "
        "trained on.",
        task=VGG,
        methods=VGG_METHODS,
        quick_methods=QUICK_VGG,
        epochs={"SGD": 8, "AdamW": 8, "K-FAC": 8},
        quick_epochs={"SGD": 6, "AdamW": 6, "K-FAC": 4},
        batch=128,
        quick_batch=64,
        search_seeds=(100,),
        fewer=1.0,
        quick_expected_outcomes=(),
    ),
    KFACTraining(
        name="kfac-shakespeare",
        figure="beside it, a transformer",
        claim="K-FAC trains a small transformer on tiny Shakespeare in fewer steps and less time "
        "than SGD and AdamW",
        about=f"{_CHOICE} Losses are of a character, on a quarter of the text and on its last "
        "tenth, which is held out.",
        task=SHAKESPEARE,
        methods=TEXT,
        quick_methods=QUICK_TEXT,
        epochs={"SGD": 12, "AdamW": 12, "K-FAC": 12},
        quick_epochs={"SGD": 12, "AdamW": 12, "K-FAC": 8},
        batch=64,
        quick_batch=64,
        search_seeds=(100,),
        fewer=1.0,
        expected_outcomes=(False, False),
        quick_expected_outcomes=(),
    ),
)
