"""Agreement with NetKet: local energies, forces and the tensor of one network on the same samples.

NetKet has an environment of its own, whose interpreter is given:

    pullback bench vmc-netket --python /path/to/netket/bin/python

Without it, or where NetKet is not installed there, the comparison is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import pullback as pb
from pullback import vmc
from pullback.metrics import FubiniStudy
from pullback.vmc.amplitude import EvaluationOptions, Evaluator, LogAmplitude

from ..framework.benchmark import RESULTS, make_parser, write_record

RESULT = RESULTS / "vmc-netket.json"

#: what NetKet's own interpreter runs; it prints whether NetKet is there
NETKET_SIDE = """
import sys
try:
    import netket as nk
except ImportError:
    print("missing")
    sys.exit()
import jax
import numpy as np

data = dict(np.load(sys.argv[1]))
samples = data["samples"]
sites = samples.shape[1]
graph = nk.graph.Chain(sites)
if str(data["hamiltonian"]) == "ising":
    hilbert = nk.hilbert.Spin(0.5, sites)
    operator = nk.operator.Ising(hilbert, graph, h=0.7, J=-1.0)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=len(samples))
else:
    hilbert = nk.hilbert.Spin(0.5, sites, total_sz=0)
    operator = nk.operator.Heisenberg(hilbert, graph, sign_rule=True)
    sampler = nk.sampler.MetropolisExchange(hilbert, graph=graph, n_chains=len(samples))
model = nk.models.RBM(alpha=2, use_visible_bias=False, param_dtype=float)
state = nk.vqs.MCState(sampler, model, n_samples=len(samples), n_discard_per_chain=0)
state.parameters = {"Dense": {"kernel": data["weight"].T, "bias": data["bias"]}}
state._samples = samples[:, None]
estimators = state.local_estimators(operator)
local = np.asarray(getattr(estimators, "data", estimators)).reshape(-1)
_, forces = state.expect_and_forces(operator)
tensor = state.quantum_geometric_tensor(nk.optimizer.qgt.QGTJacobianDense(holomorphic=False))
arrays = {
    "local": local, "tensor": tensor.to_dense(), "kernel": forces["Dense"]["kernel"],
    "bias": forces["Dense"]["bias"], "log_psi": state.log_value(samples),
}
np.savez(sys.argv[2], **{name: np.array(value, dtype=complex) for name, value in arrays.items()})
print("done")
"""


def relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """|a − b|/|b|."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def reorder(tensor: np.ndarray, sites: int, hidden: int) -> np.ndarray:
    """NetKet's order of parameters (bias, kernel of (sites, hidden)) as ours (weight, bias)."""
    kernel = hidden + np.arange(sites * hidden).reshape(sites, hidden).T.reshape(-1)
    order = np.concatenate([kernel, np.arange(hidden)])
    return tensor[np.ix_(order, order)]


def compute_ours(
    hamiltonian: vmc.Hamiltonian, network: vmc.Rbm, samples: Tensor
) -> dict[str, np.ndarray]:
    """Local energies, half the gradient, and the dense tensor by the pipeline."""
    model = LogAmplitude(network)
    evaluator = Evaluator(model, EvaluationOptions())
    local = vmc.compute_local_energies(hamiltonian, evaluator, samples).values.real
    parameters = dict(model.named_parameters())
    inputs = samples.double()
    linear = pb.maps.ModuleMap(model, pb.maps.Call.of(inputs)).linearize(parameters)
    event = tuple(linear.value.shape[1:])
    factor = pb.metrics.Scaled(FubiniStudy().factor(linear.value), 1 / len(samples), event)
    gram = pb.grams.assemble([pb.grams.RowBlock(linear, factor)], "rows", 2**30)
    cotangent = ((local - local.mean()) / len(samples)).reshape(linear.value.shape)
    return {
        "local": local.numpy(),
        "force": linear.vjp(cotangent).detach().numpy(),
        "tensor": gram.dense().detach().numpy(),
        "log_psi": evaluator.log_psi(samples).numpy(),
    }


def compare(name: str, python: str) -> dict[str, float] | None:
    """Relative differences of one Hamiltonian, or None where NetKet is missing."""
    sites = 10
    lattice = vmc.Chain(sites)
    torch.manual_seed(0)
    network = vmc.Rbm(sites, features=2).double()
    torch.nn.init.normal_(network.hidden.weight, std=0.3)
    hamiltonian: vmc.Hamiltonian = vmc.Heisenberg(lattice)
    if name == "ising":
        hamiltonian = vmc.TransverseFieldIsing(lattice, field=0.7)
    chains = vmc.MarkovChains(hamiltonian, vmc.Metropolis(), 64, 0, torch.device("cpu"))
    evaluator = Evaluator(LogAmplitude(network), EvaluationOptions())
    samples = chains.draw(evaluator).flatten(0, 1)
    ours = compute_ours(hamiltonian, network, samples)
    with tempfile.TemporaryDirectory() as folder:
        inputs_file = Path(folder) / "given.npz"
        answer = Path(folder) / "answer.npz"
        np.savez(
            inputs_file,
            samples=samples.numpy(),
            weight=network.hidden.weight.detach().numpy(),
            bias=network.hidden.bias.detach().numpy(),
            hamiltonian=name,
        )
        command = [python, "-c", NETKET_SIDE, str(inputs_file), str(answer)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if "missing" in process.stdout:
            return None
        if process.returncode:
            raise RuntimeError(process.stderr)
        theirs = dict(np.load(answer))
    force = np.concatenate([theirs["kernel"].T.reshape(-1), theirs["bias"]]).real
    tensor = reorder(theirs["tensor"].real, sites, 2 * sites)
    return {
        "log psi": relative_difference(ours["log_psi"], theirs["log_psi"].real),
        "local energies": relative_difference(ours["local"], theirs["local"].real),
        "forces": relative_difference(ours["force"], force),
        "tensor": relative_difference(ours["tensor"], tensor),
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Compare both Hamiltonians and write the record."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--python", default="", help="an interpreter that has NetKet")
    python = parser.parse_args(arguments).python
    if not python or not Path(python).exists():
        print("skipped: give --python with an interpreter that has NetKet")
        return
    version = subprocess.run(
        [python, "-c", "import netket; print(netket.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    record: dict[str, object] = {
        "environment": f"torch {torch.__version__}, NetKet {version}, CPU, float64"
    }
    for name in ("ising", "heisenberg"):
        differences = compare(name, python)
        if differences is None:
            print("skipped: that interpreter has no NetKet")
            return
        record[name] = differences
        print(name, json.dumps(differences))
    write_record(RESULT, record)


if __name__ == "__main__":
    main(sys.argv[1:])
