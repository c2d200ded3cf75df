"""A certificate made by hand, for what prints and stores certificates."""

from dataclasses import replace

from newtention.certify.certificate import Basin, Certificate, Flat

LOCAL = Certificate(
    local_minimum="proved",
    global_minimum="not certified",
    distance=3.247e-11,
    uniqueness_radius=0.04219,
    smallest_eigenvalue=0.08757,
    eigenvalue_proved=True,
    gradient=6.497e-13,
    step=3.125e-11,
    kantorovich=2.747e-7,
    lipschitz=951.5,
    lipschitz_level="unfolding",
    lipschitz_radius=0.0625,
    lipschitz_levels={"radii": 3.3e6, "cauchy-schwarz": 2.5e5, "unfolding": 951.5},
    paper_log10_lipschitz=3709.2,
    certifying_ridge=1920.0,
    paper_log10_threshold=17.25,
    block_eigenvalue=-4.5,
    basin=Basin(0.01, 0.08757, 951.5, 1.507e-4, 0.0685, 1e-8, 7, True),
    flat=(Flat("shift of the keys", 3),),
    unknowns=15,
    relative_loss=0.41,
    precise=False,
    reasons=("The ridge is below the one that certifies a global minimum.",),
)

GLOBAL = replace(
    LOCAL,
    global_minimum="proved",
    uniqueness_radius=float("inf"),
    flat=(),
    precise=True,
    reasons=(),
)

NOTHING = replace(
    LOCAL,
    local_minimum="not certified",
    distance=float("inf"),
    uniqueness_radius=0.0,
    smallest_eigenvalue=float("nan"),
    eigenvalue_proved=False,
    gradient=float("inf"),
    step=float("inf"),
    kantorovich=float("nan"),
    lipschitz=float("inf"),
    lipschitz_levels={"radii": float("inf")},
    paper_log10_lipschitz=None,
    certifying_ridge=float("inf"),
    paper_log10_threshold=None,
    block_eigenvalue=float("-inf"),
    basin=None,
    flat=(),
    reasons=("The error bounds overflow.", "Nothing is known about the Hessian."),
)

ESTIMATED = replace(NOTHING, local_minimum="estimated", smallest_eigenvalue=0.5)
