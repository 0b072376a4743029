//! What to expect of a configuration nobody has run: small linear models over knob features.
//!
//! Start at [`Ridge::fit`]. A ridge regression with an intercept is exact where the logarithm of a time is additive in the logarithms
//! of the knobs (work grows with resolution squared, with the model's size, …), needs two observations, never fails on equal or
//! collinear ones, and states a spread that grows away from what was seen.
//!
//! Deliberately absent: which quantity is modelled and on which scale; Gaussian processes (a later refinement behind the same calls).

use ndarray::{Array1, Array2};

#[cfg(test)]
mod tests;

/// A predicted value and its standard deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
}

/// Bayesian linear regression with a Gaussian prior on the weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Ridge {
    weights: Array1<f64>,
    /// Covariance of the weights.
    covariance: Array2<f64>,
    noise: f64,
    prior: f64,
}

/// Least deviation of the noise relative to the spread of the observations: a perfect fit on few points is luck.
const NOISE_FLOOR: f64 = 0.1;

impl Ridge {
    /// Fits values at feature vectors of equal length. `prior_deviation` is how far a weight may plausibly be from zero and how far a
    /// value may be from the mean of the others. Observations that are not finite are left out; `None` when none is left.
    pub fn fit(observations: &[(Vec<f64>, f64)], prior_deviation: f64) -> Option<Self> {
        let usable: Vec<_> = observations
            .iter()
            .filter(|(x, y)| y.is_finite() && x.iter().all(|v| v.is_finite()))
            .collect();
        let width = usable.first()?.0.len() + 1;
        if usable.iter().any(|(x, _)| x.len() + 1 != width) {
            return None;
        }
        let mut design = Array2::ones((usable.len(), width));
        for (mut row, (x, _)) in design.rows_mut().into_iter().zip(&usable) {
            row.iter_mut()
                .skip(1)
                .zip(x)
                .for_each(|(to, from)| *to = *from);
        }
        let values: Array1<f64> = usable.iter().map(|(_, y)| *y).collect();
        let prior = prior_deviation.max(1e-6);
        let noise = (values.std(0.0) * NOISE_FLOOR).max(prior * 0.05);
        // Two rounds: fit, take the residuals' deviation for the noise, fit again.
        let first = Self::solve(&design, &values, noise, prior)?;
        let residuals = &values - &design.dot(&first.weights);
        let freedom = (usable.len() as f64 - width as f64).max(1.0);
        let noise = noise.max((residuals.dot(&residuals) / freedom).sqrt());
        Self::solve(&design, &values, noise, prior)
    }

    fn solve(design: &Array2<f64>, values: &Array1<f64>, noise: f64, prior: f64) -> Option<Self> {
        let weight = 1.0 / (noise * noise);
        let mut normal = design.t().dot(design) * weight;
        for (i, diagonal) in normal.diag_mut().iter_mut().enumerate() {
            // The intercept is all but free: the level of a quantity is not near zero by nature.
            let deviation = if i == 0 { prior * 1e3 } else { prior };
            *diagonal += 1.0 / (deviation * deviation);
        }
        let covariance = inverse(normal)?;
        let weights = covariance.dot(&(design.t().dot(values) * weight));
        Some(Self {
            weights,
            covariance,
            noise,
            prior,
        })
    }

    /// The value to expect at a feature vector; the intercept and the prior when its length is not the fitted one.
    pub fn guess(&self, features: &[f64]) -> Guess {
        if features.len() + 1 != self.weights.len() {
            return Guess {
                mean: self.weights[0],
                deviation: self.prior,
            };
        }
        let row: Array1<f64> = std::iter::once(1.0)
            .chain(features.iter().copied())
            .collect();
        let variance = self.noise * self.noise + row.dot(&self.covariance.dot(&row));
        Guess {
            mean: row.dot(&self.weights),
            deviation: variance.max(0.0).sqrt(),
        }
    }
}

/// Inverse of a symmetric positive definite matrix by Gauss–Jordan elimination with pivoting; `None` when it is singular.
fn inverse(mut matrix: Array2<f64>) -> Option<Array2<f64>> {
    let width = matrix.nrows();
    let mut result = Array2::eye(width);
    for column in 0..width {
        let pivot = (column..width).max_by(|a, b| {
            let size = |row: &usize| matrix[[*row, column]].abs();
            size(a).total_cmp(&size(b)).then(b.cmp(a))
        })?;
        let value = matrix[[pivot, column]];
        if !value.is_finite() || value.abs() < 1e-300 {
            return None;
        }
        for j in 0..width {
            matrix.swap([column, j], [pivot, j]);
            result.swap([column, j], [pivot, j]);
        }
        matrix.row_mut(column).mapv_inplace(|v| v / value);
        result.row_mut(column).mapv_inplace(|v| v / value);
        let (pivot_row, pivot_result) =
            (matrix.row(column).to_owned(), result.row(column).to_owned());
        for row in (0..width).filter(|row| *row != column) {
            let factor = matrix[[row, column]];
            matrix.row_mut(row).scaled_add(-factor, &pivot_row);
            result.row_mut(row).scaled_add(-factor, &pivot_result);
        }
    }
    Some(result)
}
