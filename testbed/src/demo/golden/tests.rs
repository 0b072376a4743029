//! The real detector on the real video. Both come with `compass-testbed fetch`; without them these tests say that they were not run.

use std::io::Write;

use compass_shared::evaluate::decode_detections;
use compass_shared::ids::{KnobName, OperatorId};
use compass_shared::model::pipeline::{KnobValue, PipelineConfiguration};
use compass_shared::vision::overlap;

use super::super::real;
use super::*;
use crate::fetch::Fetched;

/// Set where the fetched files must be there, so that nothing is left out in silence.
const REQUIRED: &str = "COMPASS_FETCHED";

fn fetched() -> Option<Fetched> {
    match Fetched::find() {
        Ok(fetched) => Some(fetched),
        Err(error) if std::env::var_os(REQUIRED).is_some() => panic!("{error:#}"),
        Err(error) => {
            // Not through the macros, which a test's output is captured from.
            let _ = writeln!(std::io::stderr(), "NOT RUN: {error:#}");
            None
        }
    }
}

/// A configuration with these values and golden ones elsewhere.
fn configuration(pipeline: &Pipeline, values: &[(&str, &str, i64)]) -> PipelineConfiguration {
    let mut configuration = pipeline.golden();
    for (operator, knob, value) in values {
        let own = configuration
            .0
            .get_mut(&OperatorId::new(*operator).unwrap());
        let knob = KnobName::new(*knob).unwrap();
        own.unwrap().0.insert(knob, KnobValue::Integer(*value));
    }
    configuration
}

struct World {
    networks: Networks,
    pipeline: Pipeline,
    catalogue: std::sync::Arc<Catalogue>,
    pictures: Vec<Arc<[u8]>>,
}

fn world() -> Option<World> {
    let fetched = fetched()?;
    let configs = real::configs().unwrap();
    let pipeline = configs.pipelines.values().next().unwrap().clone();
    let pictures = footage::read(&fetched.video().0, 10.0).unwrap();
    Some(World {
        networks: Networks::new(&real::artifacts(&fetched, &configs.catalogue).unwrap()).unwrap(),
        pipeline,
        catalogue: configs.catalogue,
        pictures,
    })
}

impl World {
    fn chain(&self, values: &[(&str, &str, i64)]) -> Chain {
        let configuration = configuration(&self.pipeline, values);
        let golden = Golden {
            pipeline: &self.pipeline,
            catalogue: &self.catalogue,
            networks: &self.networks,
            rate_hz: 10.0,
        };
        Chain::load(&golden, &configuration).unwrap()
    }
}

/// Three people of the first frame, looked up by eye: left, top, right, bottom in pixels of 768 × 576.
const PEOPLE: [[f32; 4]; 3] = [
    [495.0, 151.0, 528.0, 230.0],
    [639.0, 235.0, 682.0, 321.0],
    [248.0, 216.0, 279.0, 307.0],
];

#[test]
fn every_fetched_network_runs_and_the_largest_find_the_people_of_the_first_frame() {
    let Some(world) = world() else { return };
    for (input, least) in [(160, 0), (224, 1), (300, 2), (416, 2), (512, 3), (640, 3)] {
        let mut chain = world.chain(&[("detector", "input", input)]);
        let found = chain.run(&world.pictures[0]).unwrap().unwrap();
        let found = decode_detections(&found).unwrap();
        let hits = PEOPLE.iter().filter(|[left, top, right, bottom]| {
            let person = [
                left / 768.0,
                top / 576.0,
                (right - left) / 768.0,
                (bottom - top) / 576.0,
            ];
            found
                .iter()
                .any(|d| overlap([d.x, d.y, d.w, d.h], person) >= 0.5)
        });
        let hits = hits.count();
        assert!(hits >= least, "{input} px: {hits} of 3 in {found:?}");
        assert!(found.iter().all(|d| d.class == 3), "{found:?}");
    }
}
