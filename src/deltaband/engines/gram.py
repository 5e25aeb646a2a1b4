"""A damped Gram matrix M + λI and its Cholesky factor in the memory of one square matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import linalg
from scipy.linalg import blas, lapack

from ..errors import SingularMatrixError

BLOCK = 256


def empty(m: int) -> np.ndarray:
    """An (m, m) float64 matrix of zeros in the order LAPACK works on in place."""
    return np.zeros((m, m), order="F")


def add_gram(M: np.ndarray, X: np.ndarray) -> None:
    """M += XᵀX, in the upper triangle and in place; X is (b, m), row by row in memory."""
    _check_in_place(blas.dsyrk(1.0, X.T, beta=1.0, c=M, lower=0, overwrite_c=1), M)


def add_outer_gram(M: np.ndarray, X: np.ndarray) -> None:
    """M += XXᵀ, in the upper triangle and in place; X is (m, c), row by row in memory."""
    _check_in_place(blas.dsyrk(1.0, X.T, beta=1.0, c=M, trans=1, lower=0, overwrite_c=1), M)


def add_up(M: np.ndarray, total: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace the upper triangle by its total, some columns at a time: half of the matrix does not travel."""
    for i in range(0, len(M), BLOCK):
        j = min(i + BLOCK, len(M))
        M[:j, i:j] = total(M[:j, i:j])


def eigh(M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (m,) of M, largest first, and eigenvectors (m, m); from the upper triangle, and over it."""
    e, V = linalg.eigh(M, lower=False, driver="evd", overwrite_a=True, check_finite=False)
    m = len(e)
    for i in range(0, m // 2, BLOCK):  # in place: numpy has no fast product with a reversed matrix
        j = min(i + BLOCK, m // 2)
        left = V[:, i:j].copy()
        V[:, i:j] = V[:, m - j : m - i][:, ::-1]
        V[:, m - j : m - i] = left[:, ::-1]
    return np.maximum(e[::-1], 0.0), V


class DampedGram:
    """A = M + λI for a positive semi-definite M given in an upper triangle; takes the matrix over.

    M stays in the upper triangle, the Cholesky factor L of A = LLᵀ lies in the lower one. Only the diagonal needs a
    place of its own.
    """

    def __init__(self, M: np.ndarray, damping: float) -> None:
        self.damping = damping
        self.size = len(M)
        self._matrix = M
        self._diagonal = M.diagonal().copy()
        self._factorise()
        self.effective_size = self.size - self._damped_inverse_norm_squared()  # m − ‖λA⁻¹‖²_F
        self._factorise()

    def half_solve(self, B: np.ndarray) -> np.ndarray:
        """L⁻¹B, so that its squared column norms are bᵀA⁻¹b; B is (m, b), column by column in memory."""
        return blas.dtrsm(1.0, self._matrix, B, lower=1)

    def solve_half_solved(self, Z: np.ndarray) -> np.ndarray:
        """A⁻¹B from Z = L⁻¹B."""
        return blas.dtrsm(1.0, self._matrix, Z, lower=1, trans_a=1)

    def gram(self) -> np.ndarray:
        """A copy of M, in the upper triangle."""
        M = self._matrix.copy(order="F")
        np.fill_diagonal(M, self._diagonal)
        return M

    def _factorise(self) -> None:
        A = self._matrix
        for i in range(0, self.size, BLOCK):
            j = min(i + BLOCK, self.size)
            A[j:, i:j] = A[i:j, j:].T
            corner = np.triu(A[i:j, i:j], 1)
            A[i:j, i:j] = corner + corner.T
        np.fill_diagonal(A, self._diagonal + self.damping)
        norm = _one_norm(A)
        L, info = lapack.dpotrf(A, lower=1, clean=0, overwrite_a=1)
        if info:
            raise SingularMatrixError(f"the leading minor of order {info} is not positive definite")
        _check_in_place(L, A)
        reciprocal_condition, _ = lapack.dpocon(L, norm, uplo="L")
        if reciprocal_condition < self.size * np.finfo(np.float64).eps:
            raise SingularMatrixError(f"its reciprocal condition number is {reciprocal_condition:.1e}")
        self.rounding = np.finfo(np.float64).eps / reciprocal_condition  # relative, of bᵀA⁻¹b

    def _damped_inverse_norm_squared(self) -> float:
        """By LAPACK's dpotri, over the factor: the caller factorises again."""
        X, info = lapack.dpotri(self._matrix, lower=1, overwrite_c=1)
        if info:
            raise SingularMatrixError(f"the factor has a zero at {info}")
        _check_in_place(X, self._matrix)
        total = float(np.square(self.damping * X.diagonal()).sum())
        for j in range(self.size):
            total += 2 * float(np.square(self.damping * X[j + 1 :, j]).sum())
        return total


def _one_norm(A: np.ndarray) -> float:
    return max(float(np.abs(A[:, j : j + BLOCK]).sum(axis=0).max()) for j in range(0, len(A), BLOCK))


def _check_in_place(result: np.ndarray, matrix: np.ndarray) -> None:
    # SciPy copies silently where an array is not in the order LAPACK wants; here that would lose the result.
    assert np.shares_memory(result, matrix), "LAPACK worked on a copy"
