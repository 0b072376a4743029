//! A seeded low-discrepancy start, then a feasibility-driven search.

use super::{Next, Search, Told, View};
use crate::space::Point;

/// Filled in next.
#[derive(Debug, Default)]
pub struct Feasible;

impl Search for Feasible {
    fn ask(&mut self, _view: &View<'_>, _count: usize) -> Next {
        Next::Try(Vec::new())
    }
    fn tell(&mut self, _point: &Point, _told: Told) {}
    fn reopen(&mut self, _warm: Vec<Point>) {}
    fn require_golden(&mut self) {}
    fn tried(&self) -> u32 {
        0
    }
}
