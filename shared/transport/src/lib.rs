//! QUIC endpoints, identity, joining and authorisation: how Compass's processes reach and recognise each other.
//!
//! Start at [`Endpoint`]: bind it, [`Endpoint::accept`] authorised peers, [`Endpoint::connect`] to others. What comes
//! out is a [`Session`] with typed streams ([`SendStream`], [`RecvStream`]); no peer becomes one before [`authorise()`] has
//! let it in and both hellos have been read. [`identity`] makes and keeps certificates, [`join`] gets the first one.
//!
//! Deliberately absent: what the messages mean (`compass_shared::wire`), who is a member of the fleet (the coordinator's
//! store), and when to reconnect (the owner's loop, with [`Backoff`]).

mod authorise;
mod backoff;
mod clock;
mod congestion;
mod deadline;
mod endpoint;
mod error;
mod handshake;
pub mod identity;
pub mod join;
mod restart;
mod session;
mod settings;
mod socket;
mod stream;
mod tls;

pub use authorise::{Alpn, Principal, Refused, Trust, authorise};
pub use backoff::{Backoff, BackoffSettings};
pub use clock::{WallClock, build_unix_s};
pub use deadline::Deadline;
pub use endpoint::{
    AcceptStats, Attempt, BindError, ConnectError, Dial, Dialler, Endpoint, EndpointConfig,
    Resolver, Show, SocketWrap, SystemResolver,
};
pub use error::{CloseCode, Closed, ResetCode, TransportError};
pub use identity::{CertificateAuthority, Identity, IdentityFolder, PrivateKey, Role};
pub use join::{JoinAuthority, JoinRefusal, JoinToken, TokenHash};
pub use restart::RestartKey;
pub use session::{QuicSession, Session, SessionStats};
pub use settings::{Congestion, SettingsError, TransportSettings};
pub use socket::{SocketReport, SocketStats};
pub use stream::{Priority, RecvStream, SendStream};
pub use tls::ServerTrust;
