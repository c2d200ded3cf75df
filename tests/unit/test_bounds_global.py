"""The global-minimum theorem: its constants under adversarial search, its claims on real solves."""

import math
from dataclasses import dataclass, field

import pytest
import torch

import newtention as nt
from newtention.bounds.convexity import (
    GlobalSizes,
    certifying_ridge,
    convexity,
    distance_from_best_response,
    distance_in_ball,
    global_sizes,
    kronecker_curvature,
    loss_gap,
    output_radius,
    residual_radius,
)
from newtention.bounds.cumulants import SECOND

F64 = torch.float64


def spectral(M):
    return float(torch.linalg.matrix_norm(M, 2))


@dataclass
class Data:
    """One sequence; X (h, d1, d2), Y (h, d3, p)."""

    A1: torch.Tensor
    A2: torch.Tensor
    A3: torch.Tensor
    B: torch.Tensor
    weight: torch.Tensor
    allowed: torch.Tensor
    scale: float = 1.0
    heads: int = 1
    generator: torch.Generator = field(default_factory=torch.Generator)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=F64)

    def point(self, size=1.0):
        d1, d2, d3, p = self.A1.shape[1], self.A2.shape[1], self.A3.shape[1], self.B.shape[1]
        return size * self.randn(self.heads, d1, d2), self.randn(self.heads, d3, p)

    def problem(self, regularizer=None):
        return nt.AttentionProblem(
            self.A1,
            self.A2,
            self.A3,
            self.B,
            mask=self.allowed,
            scale=self.scale,
            query_weights=self.weight,
            regularizer=regularizer,
        )

    def attended(self, X):
        """(w_1 ... w_h) of every row, (n, h d3)."""
        S = self.scale * self.A1 @ X @ self.A2.T
        return torch.cat(list(S.masked_fill(~self.allowed, -torch.inf).softmax(-1) @ self.A3), 1)

    def best_response(self, X, gram, centre=None):
        """Y (h, d3, p), stationary at X under the regulariser's Gram matrix."""
        W, q = self.attended(X), self.weight[:, None]
        G = torch.block_diag(*[gram] * self.heads)
        target = W.T @ (q * self.B)
        if centre is not None:
            target = target + G @ centre.flatten(0, 1)
        Y = torch.linalg.solve(W.T @ (q * W) + G, target)
        return Y.unflatten(0, (self.heads, -1))

    def radii(self, T2=None, T3=None):
        """Half diameters of the allowed keys and values, and m3; in other coordinates if given."""
        A2 = self.A2 if T2 is None else self.A2 @ T2
        A3 = self.A3 if T3 is None else self.A3 @ T3
        rows = []
        for allowed in self.allowed:
            k, v = A2[allowed], A3[allowed]
            halves = [
                torch.cdist(t, t, compute_mode="donot_use_mm_for_euclid_dist").max() / 2
                for t in (k, v)
            ]
            rows.append(torch.stack([*halves, v.norm(dim=1).max()]))
        return torch.stack(rows).T * (1 + 1e-12)

    def sizes(self, T1=None, T2=None, T3=None):
        rho2, rho3, m3 = self.radii(T2, T3)
        A1 = self.A1 if T1 is None else self.A1 @ T1
        rows = self.scale * rho2[:, None] * A1
        return global_sizes(rows, rho3, m3, self.weight, self.B, self.heads)


def draw(seed, heads=1, n=7, m=5, widths=(2, 3, 2, 2), plain=False):
    g = torch.Generator().manual_seed(seed)
    d1, d2, d3, p = widths

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    allowed = torch.rand(n, m, generator=g) < 0.6
    allowed[:, 0] = True
    weight = torch.randint(0, 4, (n,), generator=g).double() / 2
    weight[0] = 1.0
    if plain:
        allowed, weight = torch.ones_like(allowed), torch.ones_like(weight)
    size = 10 ** float(torch.rand(1, generator=g) - 0.5)
    B = size * randn(n, p)
    scale = 1.0 if plain else 0.7
    return Data(randn(n, d1), randn(m, d2), randn(m, d3), B, weight, allowed, scale, heads, g)


# The sizes.


def test_sizes_are_what_they_say():
    data = draw(1, heads=2)
    rho2, rho3, m3 = data.radii()
    rows, q = data.scale * rho2[:, None] * data.A1, data.weight
    target = data.B.norm(dim=1)
    outer = rows[:, :, None] * rows[:, None, :]

    def norm(factor):
        return spectral((factor[:, None, None] * outer).sum(0))

    expected = GlobalSizes(
        spectral(q.sqrt()[:, None] * data.B),
        math.sqrt(2 * float((q * m3**2).sum())),
        spectral((q.sqrt() * rho3)[:, None] * rows),
        norm(q * target * rho3),
        math.sqrt(2) * norm(q * m3 * rho3),
        norm(q.sqrt() * rho3),
    )
    sizes = data.sizes()
    for name, got, want in zip(sizes._fields, sizes, expected, strict=True):
        assert want * (1 - 1e-14) <= got <= want * (1 + 1e-10), name
    broken = global_sizes(rows * torch.nan, rho3, m3, q, data.B * 1e200, 2)
    assert broken.mixed == broken.cubic == broken.targets == math.inf
    assert convexity(broken, 1.0, 1.0).mu == -math.inf
    weaker = global_sizes(rows.norm(dim=1)[:, None], rho3, m3, q, data.B, 2)
    assert all(x >= y * (1 - 1e-12) for x, y in zip(weaker, sizes, strict=True))


def test_values_bound_is_never_exceeded_and_is_approached():
    for seed in range(20):
        data = draw(seed, heads=1 + seed % 2)
        bound = data.sizes().values
        for size in (0.0, 1.0, 30.0):
            W = data.attended(data.point(size)[0])
            assert spectral(data.weight.sqrt()[:, None] * W) <= bound * (1 + 1e-12)
    # All rows attend to the longest token in every head.
    data = draw(0, heads=3, plain=True)
    data.A1[:, 0] = data.A1[:, 0].abs() + 0.1
    longest = data.A3.norm(dim=1).argmax()
    data.A2[longest] = torch.tensor([10.0, 0, 0], dtype=F64)
    X = torch.zeros(3, 2, 3, dtype=F64)
    X[:, 0, 0] = 1e4
    assert spectral(data.attended(X)) == pytest.approx(data.sizes().values, rel=1e-9)


# The bound of Y.


def gram_of(data, kind):
    """A Gram matrix on Y: a multiple of the identity or a general one."""
    d3 = data.A3.shape[1]
    strength = 10 ** float(data.randn(1))
    if kind == "ridge":
        return strength * torch.eye(d3, dtype=F64)
    M = data.randn(d3 + 1, d3)
    return strength * M.T @ M


def worst_output(data, gram, centre, starts=20):
    """Largest ||Y||_2 and residual norm among points stationary in Y, over many X."""
    largest = residual = 0.0
    for i in range(starts):
        X, _ = data.point(10 ** (2.0 * i / starts - 1))
        Y = data.best_response(X, gram, centre).flatten(0, 1)
        C = data.attended(X) @ Y - data.B
        largest = max(largest, spectral(Y))
        residual = max(residual, spectral(data.weight.sqrt()[:, None] * C))
    return largest, residual


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", ["ridge", "general"])
def test_output_and_residual_radius_are_never_exceeded(kind, centred, full):
    for seed in range(400 if full else 30):
        data = draw(seed, heads=1 + seed % 3)
        gram = gram_of(data, kind)
        centre, norm = None, 0.0
        if centred:
            centre = 3 * data.point()[1]
            values, vectors = torch.linalg.eigh(gram)
            root = (vectors * values.sqrt()) @ vectors.T
            norm = spectral((root @ centre).flatten(0, 1)) * (1 + 1e-12)
        lam = float(torch.linalg.eigvalsh(gram)[0]) * (1 - 1e-12)
        sizes = data.sizes()
        args = (sizes.targets, sizes.values, lam, norm)
        output, residual = worst_output(data, gram, centre)
        assert output <= output_radius(*args) * (1 + 1e-11), seed
        assert residual <= residual_radius(*args) * (1 + 1e-11), seed


def test_output_radius_is_attained_at_both_strengths():
    # One key: w = a3 in every row, so W has the one singular value s = sqrt(n) ||a3||.
    g = torch.Generator().manual_seed(0)
    n = 6
    ones = torch.ones(n, 1, dtype=F64)
    a3, b = (torch.randn(1, 2, generator=g, dtype=F64) for _ in range(2))
    yes = ones.bool()
    data = Data(ones, torch.ones(1, 1, dtype=F64), a3, ones @ b, ones[:, 0], yes)
    s = math.sqrt(n) * float(a3.norm())
    for strength in (s**2, 3 * s**2, 30 * s**2):
        Y = data.best_response(torch.zeros(1, 1, 1, dtype=F64), strength * torch.eye(2).double())
        bound = output_radius(spectral(data.B), data.sizes().values, strength)
        assert spectral(Y[0]) == pytest.approx(bound, rel=1e-10)
        assert bound <= spectral(data.B) / (2 * math.sqrt(strength)) * (1 + 1e-12)


def test_radii_without_a_regulariser_are_infinite():
    assert output_radius(1.0, 1.0, 0.0) == math.inf
    assert output_radius(1.0, 1.0, -1.0) == math.inf
    assert residual_radius(1.0, 1.0, 0.0) == 1.0
    assert residual_radius(1.0, 1.0, 0.0, 1.0) == math.inf


# The 2 x 2 condition, by ascent on data, point and direction at once.


def residual_form(A1, A2, A3, B, X, Y, U, Z):
    """-sum_j <C_j, F_j''> along (U, Z), batched: A1 (c, n, d1), X (c, h, d1, d2)."""
    A1, A2, A3 = (t[:, None] for t in (A1, A2, A3))
    P = (A1 @ X @ A2.mT).softmax(-1)
    s = A1 @ U @ A2.mT
    t = s - (P * s).sum(-1, keepdim=True)
    V, W = A3 @ Y, A3 @ Z
    square = P * t * t
    square = square - P * square.sum(-1, keepdim=True)
    second = (square @ V + 2 * (P * t) @ W).sum(1)
    C = (P @ V).sum(1) - B
    return -(C * second).flatten(1).sum(1)


def sizes_for_ascent(A1, A2, A3, B, Y, heads):
    """a, b of the module's formulas with one diameter for all rows, differentiable."""

    def radius(A):
        apart = (A[:, :, None] - A[:, None]).square().sum(3)
        return (apart.flatten(1).amax(1) + 1e-30).sqrt() / 2

    rho2, rho3, m3 = radius(A2), radius(A3), A3.norm(dim=2).amax(1)
    rows = rho2[:, None, None] * A1
    R = torch.linalg.matrix_norm(Y.flatten(1, 2), 2)
    n = A1.shape[1]
    reach = torch.linalg.matrix_norm(B, 2) + (heads * n) ** 0.5 * m3 * R
    c = B.norm(dim=2) + heads**0.5 * (m3 * R)[:, None]

    def norm(factor):
        return torch.linalg.matrix_norm(rows.mT @ (factor[..., None] * rows), 2)

    a = SECOND * R * rho3 * torch.minimum(norm(c), reach * norm(torch.ones_like(c)))
    return a, rho3 * torch.linalg.matrix_norm(rows, 2) * reach


def ascend(count, heads, n, m, part, seed, steps=200):
    """Data, point and direction that bring the residual form near a u^2 + 2 b u z."""
    g = torch.Generator().manual_seed(seed)
    d1, d2, d3, p = 2, 2, 2, 2

    def leaf(*shape):
        return torch.randn(count, *shape, generator=g, dtype=F64, requires_grad=True)

    A1, A2, A3, B = leaf(n, d1), leaf(m, d2), leaf(m, d3), leaf(n, p)
    X, Y, U, Z = leaf(heads, d1, d2), leaf(heads, d3, p), leaf(heads, d1, d2), leaf(heads, d3, p)
    leaves = [A1, A2, A3, B, X, Y, U, Z]

    def ratio():
        a, b = sizes_for_ascent(A1, A2, A3, B, Y, heads)
        u, z = U.flatten(1).norm(dim=1), Z.flatten(1).norm(dim=1)
        if part == "x":  # the first term alone
            return residual_form(A1, A2, A3, B, X, Y, U, 0 * Z) / (a * u * u)
        both = residual_form(A1, A2, A3, B, X, Y, U, Z)
        if part == "mixed":
            both = both - residual_form(A1, A2, A3, B, X, Y, U, 0 * Z)
            return both / (2 * b * u * z)
        return both / (a * u * u + 2 * b * u * z)

    optimizer = torch.optim.Adam(leaves, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-ratio().sum()).backward()
        optimizer.step()
    return [t.detach() for t in leaves], ratio().detach()


def check_form(leaves, heads, factor=1.0):
    """The library's a and b, made smaller by the factor, against the form at the found points."""
    A1, A2, A3, B, X, Y, U, Z = leaves
    value = residual_form(*leaves)
    value_x = residual_form(A1, A2, A3, B, X, Y, U, 0 * Z)
    for i in range(len(A1)):
        ones = torch.ones(len(A1[i]), dtype=F64)
        yes = torch.ones(len(A1[i]), len(A2[i]), dtype=torch.bool)
        data = Data(A1[i], A2[i], A3[i], B[i], ones, yes, heads=heads)
        R = spectral(Y[i].flatten(0, 1))
        # A huge lambda_y leaves the radius to us.
        found = convexity(data.sizes(), 1.0, 1e40, radius=R)
        u, z = float(U[i].norm()), float(Z[i].norm())
        a, b = factor * found.a, factor * found.b
        for form, allowed in (
            (value_x[i], a * u * u),
            (value[i] - value_x[i], 2 * b * u * z),
            (value[i], a * u * u + 2 * b * u * z),
        ):
            if not float(form) <= allowed * (1 + 1e-9):
                raise AssertionError(f"case {i}: form {float(form)}, bound {allowed}")


@pytest.mark.parametrize("part", ["x", "mixed", "all"])
def test_form_is_never_exceeded_by_ascent_and_nearly_attained(part, full):
    best = 0.0
    for heads, n, m in ((1, 1, 2), (1, 3, 3), (2, 2, 3)):
        count = 400 if full else 50
        leaves, ratio = ascend(count, heads, n, m, part, seed=heads + n)
        check_form(leaves, heads)
        best = max(best, float(ratio.max()))
    assert best <= 1 + 1e-9
    # Both constants are sharp on their own; together they cannot be.
    assert best >= (0.75 if part == "all" else 0.95)


@pytest.mark.parametrize("part", ["x", "mixed"])
def test_a_constant_made_smaller_is_caught(part):
    leaves, _ = ascend(30, 1, 1, 2, part, seed=2)
    with pytest.raises(AssertionError, match="bound"):
        check_form(leaves, 1, factor=0.9)


def test_second_cumulant_constant():
    # max over p of E|t^2 - E t^2| = 8 p q |q - p| on the points -1 and 1.
    p = torch.linspace(0, 1, 200001, dtype=F64)
    best = float((8 * p * (1 - p) * (1 - 2 * p).abs()).max())
    assert best <= SECOND <= best * (1 + 1e-9)
    # No distribution does better, by ascent over values and weights.
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(500, 5, generator=g, dtype=F64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([x, w], lr=0.05)

    def spread():
        t, p = x.sin(), w.softmax(1)
        t = t - (p * t).sum(1, keepdim=True)
        square = t * t
        return (p * (square - (p * square).sum(1, keepdim=True)).abs()).sum(1)

    for _ in range(300):
        optimizer.zero_grad()
        (-spread().sum()).backward()
        optimizer.step()
    found = float(spread().detach().max())
    assert 0.999 * SECOND < found <= SECOND


# mu against Hessians.


def lowest_eigenvalue(problem, X, Y):
    return float(torch.linalg.eigvalsh(nt.hessian(problem, X, Y).to_dense())[0])


def descend(data, lam, R, starts, steps, seed):
    """Points with ||Y||_2 <= R of low curvature under a ridge, by descent on lambda_min(H)."""
    g = torch.Generator().manual_seed(seed)
    h, d1, d2 = data.heads, data.A1.shape[1], data.A2.shape[1]
    d3, p = data.A3.shape[1], data.B.shape[1]
    nx = h * d1 * d2

    def loss(theta):
        X, Y = theta[:nx].reshape(h, d1, d2), theta[nx:].reshape(h, d3, p)
        S = data.scale * data.A1 @ X @ data.A2.T
        P = S.masked_fill(~data.allowed, -torch.inf).softmax(-1)
        C = (P @ (data.A3 @ Y)).sum(0) - data.B
        return 0.5 * (data.weight[:, None] * C * C).sum() + 0.5 * lam * theta.square().sum()

    curvature = torch.func.vmap(torch.func.hessian(loss))
    theta = torch.randn(starts, nx + h * d3 * p, generator=g, dtype=F64)
    theta[:, :nx] *= 10 ** torch.linspace(-1, 1, starts, dtype=F64)[:, None]

    def project(theta):
        Y = theta[:, nx:].reshape(starts, h * d3, p)
        left, s, right = torch.linalg.svd(Y, full_matrices=False)
        Y = (left * s.clamp(max=R)[:, None]) @ right
        return torch.cat([theta[:, :nx], Y.flatten(1)], 1)

    theta[:, nx:] *= 10 * R
    theta = project(theta).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.05)
    low = math.inf
    for _ in range(steps):
        optimizer.zero_grad()
        lowest = torch.linalg.eigvalsh(curvature(theta))[:, 0]
        low = min(low, float(lowest.detach().min()))
        lowest.sum().backward()
        optimizer.step()
        with torch.no_grad():
            theta.copy_(project(theta))
    return low, theta.detach()[:, :nx].reshape(starts, h, d1, d2)


def test_curvature_stays_above_mu_under_adversarial_descent(full):
    for seed in range(20 if full else 2):
        data = draw(seed, heads=1 + seed % 2, n=4, m=3, widths=(2, 2, 2, 1))
        sizes = data.sizes()
        threshold = certifying_ridge(sizes, where="ball")
        for lam in (1.2 * threshold, 0.3 * threshold):
            ball = convexity(sizes, lam, lam)
            low, X = descend(data, lam, ball.radius, starts=8, steps=25, seed=seed)
            assert low >= ball.mu
            assert low < lam  # the descent does find negative curvature of the data part
            # Along best responses: the sharper claim, at the same adversarial X and at random ones.
            best = convexity(sizes, lam, lam, where="best response")
            assert best.mu >= ball.mu
            problem, gram = data.problem(nt.Ridge(lam, lam)), lam * torch.eye(2, dtype=F64)
            for x in (*X, *(data.point(s)[0] for s in (0.1, 1.0, 10.0))):
                y = data.best_response(x, gram)
                assert lowest_eigenvalue(problem, x, y) >= best.mu
                assert schur_eigenvalue(problem, x, y) >= best.schur


def schur_eigenvalue(problem, X, Y):
    H = nt.hessian(problem, X, Y)
    phi = H.xx - H.xy @ torch.linalg.solve(H.yy, H.xy.T)
    return float(torch.linalg.eigvalsh(phi)[0])


def test_two_by_two_arithmetic():
    sizes = GlobalSizes(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    found = convexity(sizes, 2.0, 3.0)
    assert 2 - 1e-12 < found.mu <= 2
    assert found.schur == pytest.approx(2)
    sizes = GlobalSizes(1.0, 1.0, 2.0, 1.0, 1.0, 1.0)
    found = convexity(sizes, 20.0, 9.0, where="best response")
    matrix = torch.tensor([[20 - found.a, -found.b], [-found.b, 9.0]], dtype=F64)
    lowest = float(torch.linalg.eigvalsh(matrix)[0])
    assert lowest - 1e-11 <= found.mu <= lowest
    assert found.schur == pytest.approx(20 - found.a - found.b**2 / 9)
    for lam in (0.0, -1.0):
        assert convexity(sizes, 1.0, lam).mu == -math.inf
    huge = sizes._replace(mixed=math.inf)
    assert convexity(huge, 1.0, 1.0).mu == -math.inf


def test_kronecker_curvature():
    g = torch.Generator().manual_seed(0)

    def semidefinite(d):
        M = torch.randn(d + 1, d, generator=g, dtype=F64)
        return M.T @ M

    lefts, rights = ([semidefinite(d) for _ in range(3)] for d in (2, 3))
    lowest = [[float(torch.linalg.eigvalsh(M)[0]) for M in side] for side in (lefts, rights)]
    total = sum(torch.kron(L, R) for L, R in zip(lefts, rights, strict=True))
    assert kronecker_curvature(*lowest) <= float(torch.linalg.eigvalsh(total)[0])
    assert kronecker_curvature([2.0], [3.0]) == pytest.approx(6, rel=1e-9)
    assert kronecker_curvature([-1.0], [-1.0]) == 0


# The claims.


def root_inverse(G):
    values, vectors = torch.linalg.eigh(G)
    return (vectors * values**-0.5) @ vectors.T


@pytest.mark.parametrize("where", ["ball", "best response"])
def test_certifying_ridge_is_the_smallest_and_monotone(where):
    for seed in range(10):
        data = draw(seed, heads=1 + seed % 2)
        sizes = data.sizes()
        for lx, ly, centre in ((1.0, 1.0, 0.0), (1.0, 0.05, 0.0), (0.3, 2.0, 5.0)):
            r = certifying_ridge(sizes, lx, ly, centre, where)

            def mu(r, lx=lx, ly=ly, centre=centre, sizes=sizes):
                return convexity(sizes, r * lx, r * ly, math.sqrt(r) * centre, where).mu

            assert mu(r) > 0
            assert mu(r * (1 - 1e-6)) <= 0
            assert all(mu(r * t) > 0 for t in (1.001, 1.5, 10.0, 1e4))
    assert certifying_ridge(sizes, 1.0, 0.0) == math.inf
    assert certifying_ridge(sizes._replace(mixed=math.inf)) == math.inf
    assert certifying_ridge(GlobalSizes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)) < 1e-200


def solutions(data, regularizer, starts=20):
    """Flat solutions from random starts of several sizes."""
    problem, found = data.problem(regularizer), []
    for i in range(starts):
        X, Y = data.point(10 ** (2.0 * i / starts - 1))
        solution = nt.solve(problem, start=(X, Y))
        assert solution.success, solution.message
        found.append(torch.cat([solution.X.flatten(), solution.Y.flatten()]))
    return problem, torch.stack(found)


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_above_the_ridge_all_starts_end_in_one_point(heads, full):
    for seed in range(10 if full else 2):
        data = draw(seed, heads=heads, plain=seed % 2 == 1)
        r = certifying_ridge(data.sizes())
        problem, found = solutions(data, nt.Ridge(r, r))
        assert float((found - found[0]).norm(dim=1).max()) <= 1e-8
        check_distances(data, problem, found[0], r)


def check_distances(data, problem, solution, r):
    """Both distances hold, from points all over the place."""
    nx = data.heads * data.A1.shape[1] * data.A2.shape[1]
    sizes = data.sizes()
    best_loss = nt.loss(problem, *unflat(data, solution))
    for size in (1e-6, 0.01, 1.0):
        X, Y = unflat(data, solution + size * data.randn(len(solution)))
        GX, GY = nt.gradient(problem, X, Y)
        norm_y = spectral(Y.flatten(0, 1))
        away = torch.cat([X.flatten(), Y.flatten()]) - solution
        certificate = convexity(sizes, r, r, where="best response")
        x, y = distance_from_best_response(
            sizes, certificate, float(GX.norm()), float(GY.norm()), norm_y
        )
        assert float(away[:nx].norm()) <= x + 1e-9
        assert float(away[nx:].norm()) <= y + 1e-9
        ball = convexity(sizes, r, r, radius=norm_y)
        gradient = math.hypot(float(GX.norm()), float(GY.norm()))
        assert float(away.norm()) <= distance_in_ball(ball, gradient) + 1e-9
        gap = nt.loss(problem, X, Y) - best_loss
        assert gap <= loss_gap(ball, gradient) + 1e-12 * best_loss
        assert distance_in_ball(certificate, gradient) == math.inf


def unflat(data, theta):
    nx = data.heads * data.A1.shape[1] * data.A2.shape[1]
    X = theta[:nx].reshape(data.heads, data.A1.shape[1], data.A2.shape[1])
    return X, theta[nx:].reshape(data.heads, data.A3.shape[1], data.B.shape[1])


def test_distance_in_ball_is_finite_and_true_above_its_own_threshold():
    data = draw(3)
    r = 1.01 * certifying_ridge(data.sizes(), where="ball")
    problem, found = solutions(data, nt.Ridge(r, r), starts=3)
    ball = convexity(data.sizes(), r, r)
    assert ball.mu > 0
    check_distances(data, problem, found[0], r)
    X, Y = unflat(data, found[0])
    GX, GY = nt.gradient(problem, X, Y)
    gradient = math.hypot(float(GX.norm()), float(GY.norm()))
    assert distance_in_ball(ball, gradient) < 1e-6


@pytest.mark.parametrize("kind", ["tokens", "proximity"])
def test_other_regularisers_in_their_own_coordinates(kind):
    data = draw(5, n=9, m=8)
    w = data.randn(8).abs() + 0.3
    X0, Y0 = (0.5 * t for t in data.point())

    def regularizer(r):
        if kind == "tokens":
            return nt.TokenWeights(math.sqrt(r) * w)
        return nt.Proximity((X0, Y0), strength=r)

    # W enters squared, once on X and once on Y.
    quadratic = data.problem(regularizer(1.0)).quadratic
    L, R, G = quadratic.left[0, 0], quadratic.right[0, 0], quadratic.gram[0]
    lows = [float(torch.linalg.eigvalsh(M)[0]) * (1 - 1e-12) for M in (L, R, G)]
    centre = 0.0
    if kind == "proximity":
        root = torch.linalg.inv(root_inverse(G))
        centre = spectral((root @ Y0).flatten(0, 1)) * (1 + 1e-9)
    plain = certifying_ridge(
        data.sizes(), kronecker_curvature(lows[:1], lows[1:2]), lows[2], centre
    )
    own = data.sizes(*(root_inverse(M) for M in (L, R, G)))
    whitened = certifying_ridge(own, 1 - 1e-9, 1 - 1e-9, centre)
    assert whitened < plain
    _, found = solutions(data, regularizer(whitened), starts=6)
    assert float((found - found[0]).norm(dim=1).max()) <= 1e-8


def test_nothing_is_claimed_where_minima_are_many():
    data = draw(11, n=12, m=8, widths=(2, 2, 2, 2), plain=True)
    r = 1e-4
    _, found = solutions(data, nt.Ridge(r, r), starts=8)
    assert float((found - found[0]).norm(dim=1).max()) > 1e-2
    for where in ("ball", "best response"):
        assert convexity(data.sizes(), r, r, where=where).mu < 0


def test_tighter_than_sums_over_rows():
    """Against lambda >= sum_j ||r_j|| ... of norms: the factor grows with the widths."""
    g = torch.Generator().manual_seed(1)
    A, B = (torch.randn(64, 16, generator=g, dtype=F64) for _ in range(2))
    yes, ones = torch.ones(64, 64, dtype=torch.bool), torch.ones(64, dtype=F64)
    data = Data(A, A, A, B, ones, yes)
    rho2, rho3, m3 = data.radii()
    rho = rho2 * A.norm(dim=1)

    def by_sums(lam):
        R = spectral(B) / (2 * math.sqrt(lam))
        reach = B.norm(dim=1) + m3 * R
        a = SECOND * R * float((reach * rho3 * rho**2).sum())
        b = float((reach * rho3 * rho).sum())
        return (lam - a) * lam > b * b and lam > a

    ours = certifying_ridge(data.sizes())
    assert not by_sums(5 * ours)
    assert by_sums(8 * ours)
