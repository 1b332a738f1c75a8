// Package decoy makes files that nobody has a reason to change, and stops programs that treat them as an encryptor does. The journal
// has each file before it is made. A permission event of fanotify holds each open of a decoy until it is judged.
package decoy
