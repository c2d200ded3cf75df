"""`newtention fit`: from a file to a result folder."""

from __future__ import annotations

import json
from contextlib import nullcontext

import typer

from newtention.api import Options, solve
from newtention.cli import options
from newtention.cli.folders import removed_on_failure
from newtention.cli.held_out import hold_out_of, load_held_out
from newtention.cli.hopping import hop, require_alone, sentence
from newtention.cli.progress import Display, Lines, Silent, busy, terminal
from newtention.cli.report import make_report
from newtention.cli.resume import Resume
from newtention.cli.softmax import fit_softmax
from newtention.cli.start import LayerOptions, load_start, require_proximity
from newtention.cli.terminal import complain, say
from newtention.cli.words import CONTINUABLE, describe, fitted_shape, meaning, useless
from newtention.inputs import require_positive
from newtention.io import ArrayNames, load_problem, prepare_folder, write_result
from newtention.planning import require_method

NOT_CONVERGED = 3
MAX_ITER = 200


def fit(
    source: options.Source,
    out: options.Out,
    force: options.Force = False,
    as_json: options.AsJson = False,
    no_report: options.NoReport = False,
    kind: options.FitKind = "layer",
    mask: options.Mask = "none",
    scale: options.Scale = 1.0,
    heads: options.Heads = None,
    ranks: options.Ranks = None,
    freeze: options.Freeze = None,
    dtype: options.Dtype = "float64",
    rescaled: options.Rescaled = None,
    ridge: options.Ridge = 0.0,
    ridge_x: options.RidgeX = None,
    ridge_y: options.RidgeY = None,
    proximity: options.Proximity = None,
    isotropic: options.Isotropic = False,
    layer: options.Layer = None,
    layer_prefix: options.LayerPrefix = None,
    layer_heads: options.LayerHeads = None,
    kv_heads: options.KvHeads = None,
    rope_base: options.RopeBase = None,
    rope_pairing: options.RopePairing = None,
    logit_scale: options.LogitScale = None,
    validation: options.Validation = None,
    validation_share: options.ValidationShare = None,
    patience: options.Patience = None,
    method: options.Method = "auto",
    curvature: options.Curvature = "gauss-newton",
    tol: options.Tol = None,
    max_iter: options.MaxIter = MAX_ITER,
    max_seconds: options.MaxSeconds = None,
    n_init: options.Starts = 1,
    hopping: options.Hopping = None,
    seed: options.Seed = 0,
    checkpoint: options.Checkpoint = None,
    cache_bytes: options.CacheBytes = None,
    queries: options.Queries = None,
    keys: options.Keys = None,
    values: options.Values = None,
    targets: options.Targets = None,
    offsets: options.Offsets = None,
    key_offsets: options.KeyOffsets = None,
    lengths: options.Lengths = None,
    key_lengths: options.KeyLengths = None,
) -> None:
    """Fit an attention layer, softmax(scale A1 X A2^T) A3 Y, to given outputs.

    SOURCE holds query tokens A1 and the outputs (targets), and optionally key tokens A2 and value
    tokens A3; without them, queries, keys and values are the same tokens.  2-D arrays (tokens x
    width) are one sequence, or several if there are offsets; 3-D arrays (sequences x tokens x
    width) are a padded batch, with lengths if some are shorter.  A file is never unpickled.

    With --kind attention-map the targets are attention maps, rows of weights (queries x keys), and
    X alone is fitted to them.  With --kind softmax SOURCE holds A (n x d) and b (n), or others by
    --queries and --targets, and x is fitted by softmax(A x), or in a rescaled form; DIR will hold
    softmax.json, softmax.safetensors and report.html.

    With --layer the fit begins from a real layer, with its biases, grouped keys and rotary
    positions, made smaller by --heads and --ranks.

    DIR will hold weights.safetensors (the layer, for newtention.load_layer), start.safetensors (the
    layer the fit began from), result.json and report.html.  Ctrl-C ends the fit and keeps the best
    point so far; with --checkpoint the same command continues, also after a kill.

    [bold]Examples[/bold]

    [cyan]newtention fit example:minilm-head --out result --ridge 0.1[/cyan]

    [cyan]newtention fit layer.safetensors --out result --targets attn --mask causal[/cyan]

    [cyan]newtention fit tokens.npz --out result --hopping 30[/cyan]

    [cyan]newtention fit cross.npz --out result --keys image --n-init 8 --max-seconds 60[/cyan]

    [cyan]newtention fit layer.safetensors --out result --layer source --ranks 16
    --validation-share 0.2 --checkpoint layer.ckpt[/cyan]

    [bold]Exit status[/bold]

    0 converged; 3 usable but not converged (a limit, stalled, stopped early, Ctrl-C); 2 bad input
    or refused; 1 a bug.
    """
    of_layers = {
        "--layer": layer,
        "--heads": heads,
        "--ranks": ranks,
        "--freeze": freeze,
        "--proximity": proximity,
        "--ridge-y": ridge_y,
        "--values": values,
        "--hopping": hopping,
    }
    of_data = {
        "--mask": None if mask == "none" else mask,
        "--scale": None if scale == 1 else scale,
        "--ridge-x": ridge_x,
        "--validation": validation,
        "--validation-share": validation_share,
        "--method": None if method == "auto" else method,
        "--checkpoint": checkpoint,
        "--keys": keys,
        "--offsets": offsets,
        "--key-offsets": key_offsets,
        "--lengths": lengths,
        "--key-lengths": key_lengths,
    }
    if tol is not None:
        require_positive("tol", tol)
    options.require_kind(kind, of_layers, of_data, {"--rescaled": rescaled})
    if kind == "softmax":
        fit_softmax(
            source,
            out,
            force=force,
            as_json=as_json,
            no_report=no_report,
            matrix=queries or "A",
            target=targets or "b",
            dtype=dtype,
            rescaled=rescaled,
            ridge=ridge,
            tol=tol,
            max_iter=max_iter,
            max_seconds=max_seconds,
            n_init=n_init,
            seed=seed,
        )
        return
    widths, frozen = options.as_ranks(ranks), options.as_names(freeze)
    hold_out = hold_out_of(validation, validation_share, patience)
    start_from = LayerOptions(
        layer, layer_prefix, layer_heads, kv_heads, rope_base, rope_pairing, logit_scale
    )
    start_from.require_sense()
    require_proximity(proximity, isotropic, layer, [ridge, ridge_x, ridge_y])
    require_alone(
        hopping,
        {
            "--layer": layer,
            "--ranks": ranks,
            "--freeze": freeze,
            "--validation": validation,
            "--validation-share": validation_share is not None,
            "--method": method != "auto",
            "--max-iter": max_iter != MAX_ITER,
            "--max-seconds": max_seconds is not None,
            "--n-init": n_init > 1,
            "--checkpoint": checkpoint,
        },
    )
    resume = Resume(checkpoint, out)
    created = prepare_folder(out, force, resume.beside)
    with removed_on_failure(out, created):
        names = ArrayNames(
            queries, targets, keys, values, offsets, key_offsets, lengths, key_lengths
        )
        problem, provenance = load_problem(
            source,
            names,
            mask=mask,
            scale=scale,
            ridge_x=ridge if ridge_x is None else ridge_x,
            ridge_y=0.0 if kind == "attention-map" else ridge if ridge_y is None else ridge_y,
            dtype=dtype,
            hold_out=hold_out,
            kind=kind,
        )
        held_out = load_held_out(validation, problem, provenance)
        with nullcontext() if as_json or layer is None else busy("Reading the layer"):
            start = load_start(start_from, source, problem, heads, widths)
        if start is not None and proximity is not None:
            problem = problem.with_regularizer(start.around(proximity, isotropic))
        shape = fitted_shape(problem, start, heads or 1, widths)
        require_method(method, shape, bool(frozen))
        if not as_json:
            say(describe(problem, provenance, shape))
            for part in (start, held_out):
                if part is not None:
                    say(part.sentence())
        reduced = start is not None and start.factored  # to those heads and ranks already
        chosen = Options(
            heads=None if reduced else heads,
            ranks=None if reduced or widths is None else (widths[0], widths[-1]),
            freeze=frozen,
            curvature=curvature,
            cache_bytes=cache_bytes,
            patience=Options().patience if patience is None else patience,
        )
        if hopping is not None:
            found = hop(problem, hopping, tol, seed, chosen, silent=as_json)
            solution = found.solution
            if not as_json:
                say(sentence(found))
        else:
            with _display(as_json) as display:
                solution = solve(
                    problem,
                    start=None if start is None else start.layer,
                    method=method,
                    tol=tol,
                    max_iter=max_iter,
                    max_seconds=max_seconds,
                    n_init=n_init,
                    seed=seed,
                    callback=resume.announcing(display, silent=as_json),
                    validation=None if held_out is None else held_out.problem,
                    checkpoint=checkpoint,
                    options=chosen,
                )
        document = write_result(
            out,
            problem,
            solution,
            provenance,
            force=force,
            beside=resume.beside,
            seed=seed,
            n_init=n_init,
            hopping=hopping,
            max_iter=max_iter,
            max_seconds=max_seconds,
            layer=None if start is None else start.record,
            ranks=widths,
            freeze=frozen,
            curvature=curvature,
            validation=None if held_out is None else held_out.record,
            patience=chosen.patience,
            checkpoint=resume.place,
            continued_at=resume.iteration,
        )

    if as_json:
        say(json.dumps(document, indent=1))
    else:
        say()
        say(solution.summary())
        say()
        say(meaning(problem, solution))
        say(f"Weights  {out / 'weights.safetensors'}")
        if checkpoint is not None and solution.status in CONTINUABLE:
            say(f"To go on   the same command with --force, from {checkpoint}")
    warning = useless(problem, solution)
    if warning is not None:
        complain(f"Warning: {warning}")
    if not no_report:
        try:
            with nullcontext() if as_json else busy("Making the report"):
                path = make_report(out, problem, solution, document)
        except KeyboardInterrupt:
            complain(f"Interrupted; the result is complete.  Report: newtention report {out}")
            raise typer.Exit(NOT_CONVERGED) from None
        if not as_json:
            say(f"Report   {path}")
    if not solution.success:
        raise typer.Exit(NOT_CONVERGED)


def _display(as_json: bool) -> Silent:
    if as_json:
        return Silent()
    console = terminal()
    return Lines() if console is None else Display(console)
