r"""Martens and Grosse (2015): does K-FAC get ahead of SGD and Adam, in steps and in time?

The paper trains the deep autoencoders of Hinton and Salakhutdinov and finds K-FAC much faster than
SGD with momentum. Here it meets Adam too, and every method has a grid of its own, searched on two
seeds that do not count otherwise: rates of SGD and Adam, dampings of K-FAC; on MNIST also batch
sizes, of which K-FAC takes the shortest run that ends as low as theirs. The steps that count are
those of a plain loop; the search replays CUDA graphs.

All rates fall to zero along a line, so that a run is at its best at its end: SGD and Adam reach
their own last loss late, and K-FAC has a run of at most half as many steps to get there. Losses are
of the whole training set, seconds of training alone.

    kfac-autoencoder   MNIST, 784-1000-500-250-30-…-784, tanh, Bernoulli; --quick: digits, 64-…-64
    kfac-convnet       Fashion-MNIST of 14×14, two convolutions; --quick: digits

What is not the paper's: batches of one size, no increase along the run; statistics and inverses
now and then, by a schedule; factored Tikhonov damping that stays, and a KL clip instead of the
quadratic model's rescaling and momentum. (`optim.kfac` has the paper's controls too.)
"""

from __future__ import annotations

from .experiment import Training
from .methods import LARGE
from .tasks import AUTOENCODER, CONVNET

__all__ = ["EXPERIMENTS", "Training"]

EXPERIMENTS = (
    Training(
        name="kfac-autoencoder",
        figure="deep autoencoders, in kind",
        claim="K-FAC trains a deep autoencoder in far fewer steps than SGD and Adam, and in a "
        "third of the time",
        about="Each method with the best of its grid. The paper's own sizes and controls differ.",
        task=AUTOENCODER,
        methods=LARGE,
        less=3.0,
    ),
    Training(
        name="kfac-convnet",
        figure="beside it, a conv net",
        claim="K-FAC trains a small convolutional network in fewer steps than SGD and Adam",
        about="Each method with the best of its grid.",
        task=CONVNET,
        epochs={"SGD": 40, "Adam": 40, "K-FAC": 20},
        quick_epochs={"SGD": 40, "Adam": 40, "K-FAC": 20},
        batch=500,
    ),
)
