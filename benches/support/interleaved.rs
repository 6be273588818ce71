//! Interleaved measurements, so that other load on the machine affects all of them equally.

/// The results of one measurement, by round.
pub struct Series(Vec<f64>);

impl From<Vec<f64>> for Series {
    fn from(rounds: Vec<f64>) -> Self {
        Self(rounds)
    }
}

impl Series {
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Combines the results of each round.
    pub fn zip(&self, other: &Self, of: impl Fn(f64, f64) -> f64) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(&a, &b)| of(a, b)).collect())
    }

    pub fn ratio_to(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    pub fn minus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * q).round() as usize]
    }

    /// The median, and the middle half of the rounds.
    pub fn summary(&self) -> String {
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|q| self.quantile(q));
        format!("{middle:5.2} ({low:.2}-{high:.2})")
    }

    /// The summary, the goal, and a note if the median misses it.
    pub fn against(&self, goal: f64) -> String {
        let met = if self.median() <= goal { "met" } else { "MISSED" };
        format!("{}  goal {goal:.2} {met}", self.summary())
    }
}

/// Takes the measurements `0..N` once per round, every other round in the opposite order.
pub fn interleaved<const N: usize>(
    rounds: usize,
    mut measure: impl FnMut(usize) -> f64,
) -> [Series; N] {
    let mut all = [const { Series(Vec::new()) }; N];
    for round in 0..rounds {
        for position in 0..N {
            let index = if round % 2 == 0 { position } else { N - 1 - position };
            all[index].0.push(measure(index));
        }
    }
    all
}
