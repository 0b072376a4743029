//! What to expect of a configuration nobody has run: small linear models over knob features.
//!
//! Start at [`Ridge::fit`]. A ridge regression with an intercept is exact where the logarithm of a time is additive in the logarithms
//! of the knobs (work grows with resolution squared, with the model's size, …), needs two observations, never fails on equal or
//! collinear ones, and states a spread that grows away from what was seen.
//!
//! Deliberately absent: which quantity is modelled and on which scale; Gaussian processes (a later refinement behind the same calls).

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
    weights: Vec<f64>,
    /// Inverse of the regularised normal matrix, row by row.
    covariance: Vec<f64>,
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
        let mean = usable.iter().map(|(_, y)| y).sum::<f64>() / usable.len() as f64;
        let spread = (usable.iter().map(|(_, y)| (y - mean).powi(2)).sum::<f64>()
            / usable.len() as f64)
            .sqrt();
        let prior = prior_deviation.max(1e-6);
        let mut noise = (spread * NOISE_FLOOR).max(prior * 0.05);
        // Two rounds: fit, take the residuals' deviation for the noise, fit again.
        let mut fitted = Self::solve(&usable, width, noise, prior)?;
        let freedom = (usable.len() as f64 - width as f64).max(1.0);
        let residuals: f64 = usable
            .iter()
            .map(|(x, y)| (fitted.mean(x) - y).powi(2))
            .sum();
        noise = noise.max((residuals / freedom).sqrt());
        if noise.is_finite() {
            fitted = Self::solve(&usable, width, noise, prior)?;
        }
        Some(fitted)
    }

    fn solve(
        observations: &[&(Vec<f64>, f64)],
        width: usize,
        noise: f64,
        prior: f64,
    ) -> Option<Self> {
        let mut normal = vec![0.0; width * width];
        let mut right = vec![0.0; width];
        let weight = 1.0 / (noise * noise);
        for (x, y) in observations {
            let row = with_intercept(x);
            for i in 0..width {
                right[i] += weight * row[i] * y;
                for j in 0..width {
                    normal[i * width + j] += weight * row[i] * row[j];
                }
            }
        }
        for i in 0..width {
            // The intercept is all but free: the level of a quantity is not near zero by nature.
            let deviation = if i == 0 { prior * 1e3 } else { prior };
            normal[i * width + i] += 1.0 / (deviation * deviation);
        }
        let covariance = inverse(normal, width)?;
        let weights = (0..width)
            .map(|i| {
                (0..width)
                    .map(|j| covariance[i * width + j] * right[j])
                    .sum()
            })
            .collect();
        Some(Self {
            weights,
            covariance,
            noise,
            prior,
        })
    }

    fn mean(&self, features: &[f64]) -> f64 {
        with_intercept(features)
            .iter()
            .zip(&self.weights)
            .map(|(x, w)| x * w)
            .sum()
    }

    /// The value to expect at a feature vector; the prior when its length is not the fitted one.
    pub fn guess(&self, features: &[f64]) -> Guess {
        let width = self.weights.len();
        if features.len() + 1 != width {
            return Guess {
                mean: self.weights[0],
                deviation: self.prior,
            };
        }
        let row = with_intercept(features);
        let mut variance = self.noise * self.noise;
        for i in 0..width {
            for j in 0..width {
                variance += row[i] * self.covariance[i * width + j] * row[j];
            }
        }
        Guess {
            mean: self.mean(features),
            deviation: variance.max(0.0).sqrt(),
        }
    }
}

fn with_intercept(features: &[f64]) -> Vec<f64> {
    let mut row = Vec::with_capacity(features.len() + 1);
    row.push(1.0);
    row.extend_from_slice(features);
    row
}

/// Inverse of a symmetric positive definite matrix by Gauss–Jordan elimination with pivoting; `None` when it is singular.
fn inverse(mut matrix: Vec<f64>, width: usize) -> Option<Vec<f64>> {
    let mut result = vec![0.0; width * width];
    for i in 0..width {
        result[i * width + i] = 1.0;
    }
    for column in 0..width {
        let pivot = (column..width).max_by(|a, b| {
            let size = |row: &usize| matrix[row * width + column].abs();
            size(a).total_cmp(&size(b)).then(b.cmp(a))
        })?;
        let value = matrix[pivot * width + column];
        if !value.is_finite() || value.abs() < 1e-300 {
            return None;
        }
        for j in 0..width {
            matrix.swap(column * width + j, pivot * width + j);
            result.swap(column * width + j, pivot * width + j);
        }
        for j in 0..width {
            matrix[column * width + j] /= value;
            result[column * width + j] /= value;
        }
        for row in 0..width {
            if row == column {
                continue;
            }
            let factor = matrix[row * width + column];
            if factor == 0.0 {
                continue;
            }
            for j in 0..width {
                matrix[row * width + j] -= factor * matrix[column * width + j];
                result[row * width + j] -= factor * result[column * width + j];
            }
        }
    }
    Some(result)
}
