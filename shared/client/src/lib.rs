//! The SDK with which an application registers a query, streams inputs and receives results.
//!
//! Start at [`App::register`]: it connects to the coordinator over QUIC, registers the query and keeps three things alive until the
//! [`App`] is dropped: the session with the coordinator, a data connection to the node where frames enter, and one to the node that gives
//! the results. Frames are held until the fleet says how they ended, and sent again after a failure; [`ledger`] accounts for each of them.
//! [`source`] opens videos. A live source uses [`App::send`], where the newest frame counts; a one-shot query [`App::request`], which refuses
//! what there is no room for and says when to ask again.
//!
//! ```no_run
//! # async fn example(settings: compass_client::Settings) -> Result<(), compass_client::ClientError> {
//! let mut app = compass_client::App::register(settings).await?;
//! app.send("jpeg", std::fs::read("frame.jpg").unwrap());
//! while let Some(event) = app.next_event().await {
//!     if let compass_client::Event::Result(result) = event {
//!         println!("frame {} by plan {}: {:?}", result.frame, result.generation, result.latency);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod app;
mod control;
pub mod ledger;
mod link;
mod outbox;
pub mod source;

pub use app::{Answer, App, ClientError, Event, Refused, Settings};
