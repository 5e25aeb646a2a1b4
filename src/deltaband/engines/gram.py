"""Gram matrices, their eigenvectors, and the Cholesky factor of M + λI in the memory of M."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import SingularMatrixError
from ..network.gradient_batch import CHUNK_BYTES

BLOCK_COLUMNS = 256


def empty(m: int) -> np.ndarray:
    """Return an (m, m) float64 matrix of zeros in the order LAPACK works on in place."""
    return np.zeros((m, m), order="F")


def add_gram(M: np.ndarray, X: np.ndarray, outer: bool = False) -> None:
    """M += XᵀX for X (b, m), or XXᵀ if `outer` for X (m, c), in the upper triangle and in place; X row by row."""
    from scipy.linalg import blas

    _check_in_place(blas.dsyrk(1.0, X.T, beta=1.0, c=M, trans=int(outer), lower=0, overwrite_c=1), M)


def eigh(M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues (m,) of M, largest first, and eigenvectors (m, m); from the upper triangle, and over it."""
    from scipy import linalg

    np.negative(M, out=M)  # LAPACK begins with the smallest
    e, V = linalg.eigh(M, lower=False, driver="evd", overwrite_a=True, check_finite=False)
    return np.maximum(-e, 0.0), V


def left_singular(B: np.ndarray, relative_zero: float) -> tuple[np.ndarray, np.ndarray]:
    """Return U (m, r) and the r non-zero singular values of B (m, p), largest first, through BBᵀ in float64."""
    if len(B) == 0:
        return np.zeros((0, 0)), np.zeros(0)
    C = empty(len(B))
    for _, columns in float64_columns(B):
        add_gram(C, columns, outer=True)
    squared, U = eigh(C)
    r = int((squared > relative_zero**2 * squared[0]).sum())
    return U[:, :r], np.sqrt(squared[:r])


def float64_columns(B: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield B in float64, some columns at a time, and which."""
    width = max(1, CHUNK_BYTES // (8 * max(len(B), 1)))
    for start in range(0, B.shape[1], width):
        yield slice(start, start + width), B[:, start : start + width].astype(np.float64, order="C")


def factorise(M: np.ndarray, damping: float) -> tuple[np.ndarray, float, float]:
    """Put the Cholesky factor L of A = M + λI = LLᵀ below the diagonal and on it; M stays above it.

    Returns:
        The diagonal of M, m − ‖λA⁻¹‖²_F, and the relative rounding error of bᵀA⁻¹b.
    """
    from scipy.linalg import lapack

    diagonal = M.diagonal().copy()
    _factorise(M, diagonal + damping)
    X, info = lapack.dpotri(M, lower=1, overwrite_c=1)  # A⁻¹ over the factor
    if info:
        raise SingularMatrixError(f"the factor has a zero at {info}")
    _check_in_place(X, M)
    below = sum(float(np.square(damping * X[j + 1 :, j]).sum()) for j in range(len(X)))
    norm_squared = float(np.square(damping * X.diagonal()).sum()) + 2 * below
    return diagonal, len(M) - norm_squared, _factorise(M, diagonal + damping)


def half_solve(L: np.ndarray, B: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return Z = L⁻¹B, whose squared column norms are bᵀA⁻¹b, or L⁻ᵀB, which makes A⁻¹B of Z."""
    from scipy.linalg import blas

    return blas.dtrsm(1.0, L, B, lower=1, trans_a=int(transposed))


def _factorise(A: np.ndarray, damped_diagonal: np.ndarray) -> float:
    """Put the factor into the lower triangle; return the relative rounding error of bᵀA⁻¹b."""
    from scipy.linalg import lapack

    m = len(A)
    for i in range(0, m, BLOCK_COLUMNS):
        j = i + BLOCK_COLUMNS
        A[j:, i:j] = A[i:j, j:].T
        A[i:j, i:j] = np.triu(A[i:j, i:j]) + np.triu(A[i:j, i:j], 1).T
    np.fill_diagonal(A, damped_diagonal)
    norm = max(float(np.abs(A[:, j : j + BLOCK_COLUMNS]).sum(axis=0).max()) for j in range(0, m, BLOCK_COLUMNS))
    L, info = lapack.dpotrf(A, lower=1, clean=0, overwrite_a=1)
    if info:
        raise SingularMatrixError(f"the leading minor of order {info} is not positive definite")
    _check_in_place(L, A)
    reciprocal_condition, _ = lapack.dpocon(L, norm, uplo="L")
    if reciprocal_condition < m * np.finfo(np.float64).eps:
        raise SingularMatrixError(f"its reciprocal condition number is {reciprocal_condition:.1e}")
    return float(np.finfo(np.float64).eps / reciprocal_condition)


def _check_in_place(result: np.ndarray, matrix: np.ndarray) -> None:
    """SciPy copies silently where an array is not in the order LAPACK wants; here that would lose the result."""
    assert np.shares_memory(result, matrix), "LAPACK worked on a copy"
