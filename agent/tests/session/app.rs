//! As much of an app as an agent needs to hear: sends frames of one query to its entry and hears how they end.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use compass_shared::ids::{Digest, FrameId, Generation, NodeId, QueryId};
use compass_shared::model::outcome::Outcome;
use compass_shared::wire::v1::{FrameHeader, HopControl};
use compass_transport::{
    Alpn, Deadline, Dial, Endpoint, RecvStream, Role, SendStream, ServerTrust, Session,
};

use crate::coordinator::PATIENCE;

const MESSAGE_BYTES_MAX: usize = 1 << 20;

pub(crate) struct App {
    query: QueryId,
    session: Arc<dyn Session>,
    say: SendStream,
    hear: RecvStream,
    _endpoint: Endpoint,
}

impl App {
    /// Connects to the entry and waits until frames may be sent.
    pub(crate) async fn connect(
        endpoint: Endpoint,
        query: QueryId,
        node: NodeId,
        address: SocketAddr,
        key: Digest,
    ) -> Self {
        let dial = Dial::new(Alpn::Data, Role::Node(node)).trusting(ServerTrust::Key(key));
        let session = endpoint
            .connect(&[address], &dial, Deadline::after(PATIENCE))
            .await
            .unwrap();
        let (say, mut hear) = session.take_control().unwrap();
        loop {
            let heard = hear
                .read_frame(MESSAGE_BYTES_MAX, Deadline::after(PATIENCE))
                .await;
            if matches!(heard.unwrap(), HopControl::Credit { .. }) {
                break;
            }
        }
        Self {
            query,
            session,
            say,
            hear,
            _endpoint: endpoint,
        }
    }

    pub(crate) async fn send(&self, frame: u64) {
        let header = FrameHeader {
            query: self.query.clone(),
            generation: Generation(0),
            frame: FrameId(frame),
            from: None,
            to: None,
            age_us: 0,
            content: "bytes".to_owned(),
            attempt: 0,
            payload_bytes: 5,
        };
        let deadline = Deadline::after(PATIENCE);
        let mut stream = self.session.open_uni(deadline).await.unwrap();
        stream
            .write_frame_and_bytes(&header, Bytes::from_static(b"frame"), deadline)
            .await
            .unwrap();
        stream.finish().unwrap();
    }

    /// Waits until a frame has ended.
    pub(crate) async fn end_of(&mut self, wanted: u64) -> Outcome {
        loop {
            let (frame, outcome) = tokio::time::timeout(PATIENCE, self.next_end())
                .await
                .unwrap();
            if frame.0 == wanted {
                return outcome;
            }
        }
    }

    async fn next_end(&mut self) -> (FrameId, Outcome) {
        loop {
            tokio::select! {
                message = self.hear.read_frame(MESSAGE_BYTES_MAX, Deadline::never()) => {
                    if let HopControl::Ended { frame, outcome, .. } = message.unwrap() {
                        return (frame, outcome);
                    }
                }
                stream = self.session.accept_uni(Deadline::never()) => {
                    let deadline = Deadline::after(PATIENCE);
                    let mut stream = stream.unwrap();
                    let header: FrameHeader = stream.read_frame(MESSAGE_BYTES_MAX, deadline).await.unwrap();
                    let (query, frame) = (header.query, header.frame);
                    let received = HopControl::Received { query: query.clone(), frame, to: None };
                    self.say.write_frame(&received, deadline).await.unwrap();
                    let outcome = Outcome::Answered;
                    let ended = HopControl::Ended { query, frame, to: None, outcome };
                    self.say.write_frame(&ended, deadline).await.unwrap();
                    return (frame, outcome);
                }
            }
        }
    }
}
